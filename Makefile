# The checks that CI runs; `make check` before every push.
.PHONY: check lint types test pages docs benchmarks

check: lint types test pages

lint:
	ruff check .
	ruff format --check .

types:
	mypy

test:
	python -m pytest

pages: # the site and the long examples, which the tests leave out by default
	python -m pytest -m slow tests/test_site.py tests/test_docs.py

docs:
	sphinx-build -W --keep-going -n -q docs build/docs
	@echo "Open build/docs/index.html"

benchmarks:
	python benchmarks/overhead.py
	python benchmarks/fisher.py
