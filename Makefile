# On a machine with a Rust toolchain each target is the only command needed.

CARGO ?= cargo
FUZZ_SECONDS ?= 60
SEEDS ?= 200000
FIRST ?= 0
# A scene of the demo (disk, leave, vm, net, memory, protect, rdma), or of the benchmark (quick, full, sla, policies, vhost, memory, net,
# protect, rdma, idle; core, verbs, thin).
SCENE ?=
# Options of the scene: make bench SCENE=sla BENCH="auto --rounds 3", make demo SCENE=vm DEMO="--disks 2".
BENCH ?=
DEMO ?=
# Part of the slow tests, by name or by file: make test-slow ONLY=nics::, make test-slow ONLY='--test image_disks'.
ONLY ?=

.PHONY: build test test-slow test-rdma rdma-programs guest lint tidy fmt deny fuzz sim sim-choice sim-plants soak demo bench package

build:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli

# The tests of the whole system run the binary of this very build, with its fail points.
test: guest
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked --no-fail-fast --workspace --features godwit-cli/failpoints

# Every test that make test leaves out, one at a time: hours. Needs root, for network namespaces and a DAX device, and 16 GiB of
# storage.
test-slow: guest
	scripts/install-libvirt
	scripts/install-testpmd
	GODWIT_TEST_MOTO=$$(scripts/install-moto) GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked --no-fail-fast --workspace --features godwit-cli/failpoints $(ONLY) -- \
		--ignored --nocapture --test-threads 1 --skip dax_device
ifeq ($(filter-out zero_copy,$(ONLY)),)
	GODWIT_BIN=$(CURDIR)/target/debug/godwit GODWIT_MEMORY_POOL=file \
		$(CARGO) test --locked --workspace --features godwit-cli/failpoints --test vm_crash zero_copy -- \
		--ignored --nocapture --test-threads 1
endif
	$(if $(ONLY),,scripts/test-dax)

# RDMA programs that move between three virtual machines, in ten minutes: refusals, programs and processes that each move once or
# twice, and programs of librdmacm that do not move. BUILT=1 takes the programs that make test has built.
test-rdma: rdma-programs
	target/debug/godwit-demo rdma --only refusals --only "checked: shared" --only "checked: datagrams, shared" \
		--only "without RDMA" --only write_bw --only "pingpong -e" --only "programs: rping" --only "programs: ucmatose" \
		--only "programs: udaddy" --only "programs: rstream"

# QEMU and the virtual machine that tests run in it.
guest:
	scripts/install-deps
	scripts/install-qemu
	CARGO=$(CARGO) scripts/build-guest >/dev/null

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	scripts/check-core-purity

# Lengths of files and functions, sizes of folders, links in documents, and how comments open.
tidy:
	$(CARGO) run --quiet --locked -p godwit-tidy

fmt:
	$(CARGO) fmt

# Licences, advisories and sources of everything that is linked in.
deny:
	scripts/check-dependencies

# Every parser that meets bytes from outside, for FUZZ_SECONDS each.
fuzz:
	fuzz/run $(FUZZ_SECONDS)

# Simulated migrations with faults, and how often each fault and each state was hit.
sim:
	scripts/install-deps
	$(CARGO) run --release --locked -p godwit-sim -- run --seeds 6000

# The choice of a node for twelve guests beside every policy, in virtual time. Fails where the choice costs a tenth more.
sim-choice:
	scripts/install-deps
	$(CARGO) run --release --locked -p godwit-sim -- choose

# The simulator finds each bug that it plants.
sim-plants:
	scripts/install-deps
	scripts/sim-plants

# As many runs as you like: make soak SEEDS=200000 FIRST=1000000.
soak:
	scripts/install-deps
	$(CARGO) run --release --locked -p godwit-sim -- run --seeds $(SEEDS) --first $(FIRST)

# A disk under load that moves between two nodes and back, or another scene: make demo SCENE=vm. Report: target/demo-SCENE.
demo: $(if $(filter vm net memory,$(SCENE)),guest) $(if $(filter rdma,$(SCENE)),rdma-programs)
	scripts/install-deps
	$(if $(filter protect,$(SCENE)),scripts/install-qemu && scripts/build-services-guest >/dev/null)
ifneq ($(SCENE),rdma)
	$(CARGO) build --release --locked -p godwit-cli -p godwit-demo --bins
	target/release/godwit-demo $(or $(SCENE),disk) $(DEMO)
else
	target/debug/godwit-demo rdma $(DEMO)
endif

# Godwit beside its peers, in less than ten minutes, or another scene (bench/README.md): make bench SCENE=net BENCH=--quick.
bench:
	scripts/install-deps
	$(if $(filter core verbs thin sla policies idle,$(SCENE)),,scripts/install-qemu)
	$(if $(filter memory,$(SCENE)),CARGO=$(CARGO) scripts/build-guest >/dev/null)
ifeq ($(SCENE),core)
	$(CARGO) bench --locked -p godwit-core
else ifeq ($(SCENE),verbs)
	$(CARGO) build --release --locked -p godwit-verbs --lib --example null_provider --example overhead
	target/release/examples/overhead
else ifeq ($(SCENE),thin)
	$(CARGO) build --release --locked -p godwit-cli
	GODWIT_BIN=$(CURDIR)/target/release/godwit \
		$(CARGO) test --locked -p godwit-testkit --test disks -- --ignored --nocapture many_tib
else
	$(if $(filter net protect,$(SCENE)),scripts/install-net-peers && scripts/build-net-guest >/dev/null)
	$(if $(filter rdma,$(SCENE)),scripts/build-rdma-guest >/dev/null && $(MAKE) bench SCENE=verbs)
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench $(if $(filter rdma,$(SCENE)),-p godwit-verbs -p godwit-testkit --lib) --bins
	target/release/godwit-bench $(or $(SCENE),quick) $(BENCH)
endif

# A Debian package, in target/package.
package:
	scripts/install-deps
	scripts/build-package

rdma-programs:
	scripts/install-deps
	scripts/install-qemu
	scripts/build-rdma-guest >/dev/null
ifdef BUILT
	test target/debug/deps/libgodwit_verbs.so -ef target/debug/libgodwit_verbs.so || cp target/debug/deps/libgodwit_verbs.so target/debug/
else
	$(CARGO) build --locked -p godwit-verbs -p godwit-testkit -p godwit-cli -p godwit-demo --features godwit-cli/failpoints --lib --bins
endif
