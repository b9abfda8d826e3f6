# The checks that CI runs; `make check` before every push.
.PHONY: check lint types test slow docs tables benchmarks

check: lint types test slow

lint:
	ruff check .
	ruff format --check .

types:
	mypy

test:
	python -m pytest

slow: # the site, the long examples and whatever else the tests leave out by default
	python -m pytest -m slow

docs:
	sphinx-build -W --keep-going -n -q docs build/docs
	@echo "Open build/docs/index.html"

tables: # of the methods, after one was added or its traits changed
	python docs/tables.py

benchmarks:
	python benchmarks/overhead.py
	python benchmarks/fisher.py
