# The menu of this tree; `make help` prints it.  What each line does is in scripts/ and in CMake's lists.

MODE    ?= release
BUILD    = $(if $(filter release,$(MODE)),build,build-$(MODE))
JOBS    ?= $(shell nproc)
PREFIX  ?= /usr/local
CONF    ?= etc/local
RUN     ?= run
OPTIONS ?=
RUNS    ?= 1000000
# What follows di-up uses the same folders.
ifneq ($(and $(filter serve,$(MAKECMDGOALS)),$(filter -r% -c%,$(OPTIONS))),)
$(error OPTIONS="$(OPTIONS)": name the run directory with RUN=RUNDIR, and the configuration with CONF=CONFDIR)
endif
PROGRAMS := $(notdir $(wildcard cmd/di-*))
FUZZERS  := $(addprefix fuzz_,$(notdir $(patsubst %/,%,$(dir $(wildcard tests/fuzz/*/CMakeLists.txt)))))
# The thread sanitizer of GCC 12 wants a predictable address space where the kernel randomises much.
STEADY   = $(if $(filter tsan,$(MODE)),$(shell setarch -R true 2>/dev/null && echo setarch -R))

.NOTPARALLEL:
.PHONY: all serve check bench gpu-check fuzz golden man lint install clean help configure packages

all: configure                  ## the programs, into build/bin
	ninja -C $(BUILD) -j $(JOBS) $(PROGRAMS)

serve: packages all             ## a fleet on this machine, and a first question
	scripts/di-up -c $(CONF) -r $(RUN) $(OPTIONS)
	@echo
	scripts/ask -r $(RUN) "What does di-kvd do?"
	@echo
	@echo "Ask the next one:  scripts/ask -r $(RUN) \"How do I start the fleet?\""
	@echo "Talk to the model: $(BUILD)/bin/di-ctl -r $(RUN) chat"
	@echo "Look at the fleet: $(BUILD)/bin/di-ctl -r $(RUN) show fleet"
	@echo "Stop it:           scripts/di-down -r $(RUN)"

check: packages configure       ## every test; MODE=asan and MODE=tsan too
	ninja -C $(BUILD) -j $(JOBS)
	cd $(BUILD) && $(STEADY) ctest -j 2 --output-on-failure $(if $(filter tsan,$(MODE)),-L '^(unit|sim|integration)$$')

bench: configure                ## numbers of this machine: engine, HTTP server, data plane, eviction, code of stripes, hand-over, growth with stores; PEERS=VENV with nixl, mooncake
	ninja -C $(BUILD) -j $(JOBS)
	$(BUILD)/bin/engine_bench
	$(BUILD)/bin/http_bench
	$(BUILD)/bin/transfer_bench
	$(BUILD)/bin/store_bench
	$(BUILD)/bin/evict_trace
	$(BUILD)/bin/erasure_bench
	$(BUILD)/bin/hedge_sim
	$(BUILD)/bin/directory_bench
	$(BUILD)/bin/handoff_bench
	DI_BUILD_DIR=$(BUILD) python3 tests/bench/handover_bench.py
	DI_BUILD_DIR=$(BUILD) python3 tests/bench/stripe_bench.py --peers "$(PEERS)"
	DI_BUILD_DIR=$(BUILD) python3 tests/bench/capacity_bench.py
	python3 tests/bench/peers_bench.py --build $(BUILD) --peers "$(PEERS)"

gpu-check: configure            ## what needs a GPU: its kernels against the reference, and their speed
	@ninja -C $(BUILD) -t query gpu_kernels >/dev/null 2>&1 || { echo "SKIP: built without CUDA"; exit 0; }; \
	ninja -C $(BUILD) -j $(JOBS) gpu_kernels gather_bench && \
	$(BUILD)/bin/gpu_kernels && $(BUILD)/bin/gather_bench

fuzz: MODE = fuzz
fuzz: configure                 ## RUNS=1000000 mutations for each decoder of outside bytes
	ninja -C $(BUILD) -j $(JOBS) $(FUZZERS)
	set -e; for one in $(FUZZERS); do $(BUILD)/bin/$$one --runs $(RUNS) tests/fuzz/$${one#fuzz_}/corpus; done

golden: configure               ## writes tests/golden anew; review the difference
	ninja -C $(BUILD) -j $(JOBS) unit_wire
	DI_GOLDEN_WRITE=1 $(BUILD)/bin/unit_wire --gtest_brief=1
	scripts/gen-wire-man
	if python3 -c 'import torch' 2>/dev/null; then python3 scripts/make-golden-logits.py; \
	else echo "SKIP tests/golden/logits: python3-torch is not installed"; fi
	git status --short tests/golden man

man:                            ## checks the pages and renders them into build/man as HTML
	mandoc -T lint -W warning man/*.[1-9]
	mkdir -p build/man
	for page in man/*.[1-9]; do \
	mandoc -T html -O man=%N.%S.html,toc $$page > build/man/$${page#man/}.html || exit 1; done

lint: all                       ## style, layers, pages, parameters, layout
	cd $(BUILD) && ctest -L style --output-on-failure
	if command -v clang-format >/dev/null; then \
	find lib cmd kernels tests -name '*.h' -o -name '*.cpp' | xargs clang-format --dry-run -Werror; \
	else echo "SKIP layout: clang-format is not installed"; fi

install: all                    ## to $(DESTDIR)$(PREFIX): programs, pages, units, samples
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system
	install $(addprefix $(BUILD)/bin/,$(PROGRAMS)) $(DESTDIR)$(PREFIX)/bin
	for n in 5 7 8; do install -d $(DESTDIR)$(PREFIX)/share/man/man$$n && \
	install -m 644 man/*.$$n $(DESTDIR)$(PREFIX)/share/man/man$$n || exit 1; done
	for unit in etc/systemd/*.service; do \
	sed 's,@bindir@,$(PREFIX)/bin,' $$unit > $(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit##*/} || exit 1; done
	install -d $(DESTDIR)$(PREFIX)/share/di && cp -R etc/cluster etc/local etc/model-demo $(DESTDIR)$(PREFIX)/share/di

clean:                          ## removes what was built, not what runs
	rm -rf build build-*

help:                           ## this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

packages:
	scripts/bootstrap

configure:
	@scripts/bootstrap --check || { echo "run scripts/bootstrap, or make serve, to install them" >&2; exit 1; }
	@[ -f $(BUILD)/build.ninja ] || cmake -S . -B $(BUILD) -G Ninja -DDI_MODE=$(MODE)
