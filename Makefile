# make demo    two real servers share a prefix: quality and speed, as a table and a picture
# make test    the tests;  make test-all   the slow ones too;  make check   ruff, mypy
# make quick   the tests of the cache and the engine that start no server, two files at a time
# make mutants changes the modules that decide, and says what no test sees: tests/mutants.md
# make bench   the benchmarks, 35 minutes, into benchmarks/results;  make tables   what pages have of them
# make soak    random operations, faults and inputs: an hour or more
# make docs    the documentation, into build/docs
# make gpu     what the CUDA path does on this device; ONLY=ttft runs that part, five minutes at most
# make newest  what the newest SGLang of the package index has changed of what this hooks and calls
# make profiles profile the small model pairs again
# make real    a real model, its skills and what they are asked, into build/real
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo quick test test-all mutants check docs bench tables gpu newest soak profiles real install
.DEFAULT_GOAL := test

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt platforms/torch_cpu/pyproject.toml
	@echo "Installing into $(VENV): SGLang and torch are large, this takes some minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; run make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt \
		-e '.[test,check,docs]' -e platforms/torch_cpu
	@touch $@

# Without the real pair, which has to be downloaded, the demo takes the small one and says so.
demo: $(INSTALLED)
	@$(BIN)/python -m tools.real || true
	$(BIN)/droidspeak demo --out out/demo

# One process runs a whole file. Files keep their order: those of few tests may take long, and would
# otherwise come last.
BESIDE := -n 2 --dist loadfile --no-loadscope-reorder
# A busy machine can fail a test of servers. Three tests in all get a second try, and the summary
# shows what failed at the first one.
RETRY := --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks
# Files with tests beside which nothing runs: to import all others takes half a minute.
ALONE := $(shell grep -lr --include='test_*.py' 'mark\.alone' tests platforms)

quick: $(INSTALLED)
	$(BIN)/python -m pytest $(BESIDE) -m 'not slow and not server and not long' tests/cachetree tests/engine

test: $(INSTALLED)
	$(BIN)/python -m pytest $(BESIDE) $(RETRY) -m 'not slow and not alone'
	$(BIN)/python -m pytest $(RETRY) -m 'not slow and alone' $(ALONE)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m ''

mutants: $(INSTALLED)
	$(BIN)/python -m pip install -e '.[mutants]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

check: $(INSTALLED) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A warning, a link that leads nowhere say, fails.
docs: $(INSTALLED)
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

tables: $(INSTALLED)
	$(BIN)/python -m tools.reference

gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu --json build/gpu.json $(if $(ONLY),--only $(ONLY))

# To be read, not passed: a release that moved something is no error of this one.
newest: $(INSTALLED)
	@rm -rf build/newest
	@$(BIN)/python -m pip download -q --no-deps --only-binary :all: -d build/newest sglang
	@$(BIN)/python -m zipfile -e build/newest/sglang-*.whl build/newest
	@ls -d build/newest/*.dist-info
	@$(BIN)/droidspeak doctor --sglang build/newest || true

soak: $(INSTALLED)
	$(BIN)/python tests/cachetree/tree_walks.py --operations 1000000
	$(BIN)/python tests/engine/soak.py --minutes 10
	$(BIN)/python tests/cachetree/soak_memory.py --minutes 30
	$(BIN)/python tests/fuzz/fuzz.py

# The small pairs' prompts, answers and data: 24 documents choose a block and 96 judge it; on 400, with
# those 96, the drift guard's bound is measured. Exit status 3 would say that a pair did not pass, and
# is no failure: its profile teaches a server to refuse.
PAIRS := examples/pairs
QUESTIONS := $(BIN)/python -m tools.pairs.questions
ASKED := --template '<bos> {context} {input}' --metric f1 --max-new 8
PROFILE := OMP_NUM_THREADS=1 $(BIN)/droidspeak profile
BIOGRAPHIES := --data $(PAIRS)/data/train.jsonl --held-out build/pairs/biographies/held_out.jsonl
TABLES := --data build/pairs/few_tables/train.jsonl --held-out build/pairs/tables/held_out.jsonl
FINE_TUNES := --sender $(PAIRS)/weights/sender --receiver $(PAIRS)/weights/receiver
FOUNDATION := --sender $(PAIRS)/weights/foundation
ADAPTER := --receiver $(PAIRS)/weights/foundation --receiver-lora $(PAIRS)/weights
OR_NOT := || test $$? -eq 3

# Arguments: the profile's name, its models, what chooses and judges it, what calibrates it.
define profiled
	$(PROFILE) $(2) $(3) $(ASKED) --out $(PAIRS)/$(1).json $(OR_NOT)
	$(PROFILE) calibrate $(PAIRS)/$(1).json $(2) $(ASKED) --data build/pairs/$(4)/held_out.jsonl
endef

profiles: $(INSTALLED)
	$(QUESTIONS) --documents 96 --out build/pairs/biographies
	$(QUESTIONS) --documents 400 --out build/pairs/many_biographies
	$(QUESTIONS) --task tables --documents 96 --out build/pairs/tables
	$(QUESTIONS) --task tables --documents 400 --out build/pairs/many_tables
	$(QUESTIONS) --task tables --out build/pairs/few_tables
	$(call profiled,sender_to_receiver,$(FINE_TUNES),$(BIOGRAPHIES),many_biographies)
	$(call profiled,sender_lora_to_receiver_lora,$(FOUNDATION) --sender-lora $(PAIRS)/weights/sender_lora \
		$(ADAPTER)/receiver_lora,$(BIOGRAPHIES),many_biographies)
	$(call profiled,foundation_to_receiver_lora,$(FOUNDATION) $(ADAPTER)/receiver_lora,$(BIOGRAPHIES),many_biographies)
	$(call profiled,foundation_to_tables_lora,$(FOUNDATION) $(ADAPTER)/tables_lora,$(TABLES),many_tables)

real: $(INSTALLED)
	$(BIN)/python -m tools.real
