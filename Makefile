# The workshop's verbs. Each makes the environment first where it is missing (see app/__main__.py).
PYTHON ?= python3
RUN := $(PYTHON) -m app
TOOL := $(RUN) python -m
UV ?= uv
COMPILE := UV_CUSTOM_COMPILE_COMMAND='make lock' $(UV) pip compile --universal --generate-hashes --python-version 3.11 --quiet

.DEFAULT_GOAL := help
.PHONY: help demo serve dev test check fmt lint types contracts openapi schema bench large mutants faults standby herd container-proof lock

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

demo: ## tell the story of a refund that fails, before its reply and after it, on a Postgres of its own
	$(RUN) demo

serve: ## serve the API and unwind (COUNTERMAND_DATABASE_URL, else an embedded Postgres)
	$(RUN) serve

dev: ## serve with a demo org and its keys printed
	$(RUN) dev

test: ## run the tests; ARGS go to pytest, e.g. make test ARGS="tests/domain -x"
	$(RUN) test $(ARGS)

check: ## run format, lint, types, import contracts, dependencies and golden files
	$(RUN) check

fmt: ## format, and mend what the linter can mend
	$(TOOL) ruff format .
	$(TOOL) ruff check --fix .

lint: ## run the linter
	$(TOOL) ruff check .

types: ## run the type checker
	$(TOOL) mypy --strict app tests migrations bench deploy examples

contracts: ## check who imports whom
	$(RUN) python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

openapi: ## rewrite openapi/openapi.json from the code
	COUNTERMAND_REWRITE_GOLDEN=1 $(TOOL) pytest -q -m golden tests/api

schema: ## rewrite migrations/schema.sql from the migrations
	COUNTERMAND_REWRITE_GOLDEN=1 $(TOOL) pytest -q -m golden tests/storage

bench: ## measure the service side by side with a yardstick, DBOS and Restate, on a Postgres of its own; OPTIONS="--quick --only pair"
	$(TOOL) bench $(OPTIONS)

large: ## unwind a session of 10,000 steps and print what each undo cost
	COUNTERMAND_TEST_LARGE_STEPS=10000 $(TOOL) pytest -q -s --timeout 900 tests/engine/test_large_sessions.py

mutants: ## break the code in small ways and see that a test notices each
	$(TOOL) tests.mutants

faults: ## break things under load by seeds and hold what happened against the invariants; OPTIONS="--seeds 17"
	$(TOOL) tests.faults $(OPTIONS)

standby: ## kill a primary under load, promote its standby, and print what was lost, by the way of replicating
	$(TOOL) tests.faults.standby

herd: ## fail 10,000 sessions at once, with and without an outage in the middle, and print figures; OPTIONS="--sessions 1000"
	$(TOOL) tests.faults.herd $(OPTIONS)

container-proof: ## build the image and run docker-compose.yml's services without Docker (Linux, root); OPTIONS="--base IMAGE"
	$(TOOL) deploy.container_proof $(OPTIONS)

lock: ## resolve the locks anew, keeping what still fits; OPTIONS=--upgrade takes the newest (needs uv)
	$(COMPILE) $(OPTIONS) pyproject.toml --extra embedded --output-file requirements.lock
	$(COMPILE) $(OPTIONS) pyproject.toml --extra dev --constraint requirements.lock --output-file requirements-dev.lock
	echo 'hatchling>=1.27,<2' | $(COMPILE) $(OPTIONS) - --output-file requirements-build.lock
	$(COMPILE) $(OPTIONS) bench/requirements.in --output-file bench/requirements.lock
	echo 'uv>=0.13,<0.14' | $(COMPILE) $(OPTIONS) - --output-file requirements-uv.lock
