# The checks that CI runs; `make check` before every push.
.PHONY: check lint types test docs benchmarks

check: lint types test

lint:
	ruff check .
	ruff format --check .

types:
	mypy

test:
	python -m pytest

docs:
	sphinx-build -W --keep-going -n -q docs build/docs
	@echo "Open build/docs/index.html"

benchmarks:
	python benchmarks/overhead.py
	python benchmarks/fisher.py
