# The checks that CI runs; `make check` before every push.
.PHONY: check lint types test benchmarks

check: lint types test

lint:
	ruff check .
	ruff format --check .

types:
	mypy

test:
	python -m pytest

benchmarks:
	python benchmarks/overhead.py
	python benchmarks/fisher.py
