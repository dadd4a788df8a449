# On a machine with a Rust toolchain each target is the only command needed.

CARGO ?= cargo
FUZZ_SECONDS ?= 60
SEEDS ?= 200000
FIRST ?= 0
ROUNDS ?= 1

.PHONY: build test test-s3 guest sim sim-plants soak demo demo-leave demo-vm demo-net demo-memory demo-rdma demo-rdma-build test-rdma test-rdma-deaths test-rdma-container-deaths soak-rdma package bench bench-full bench-idle-copy bench-sla bench-sla-rate bench-sla-steady bench-vhost bench-verbs bench-rdma bench-core bench-policies sim-choice lint fmt fuzz deny

build:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli

# The tests of the whole system run the binary of this very build, with its fail points.
test: guest
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked --no-fail-fast --workspace --features godwit-cli/failpoints

# Images at an S3 server that is not ours; make test has one in its own process.
test-s3:
	scripts/install-deps
	GODWIT_TEST_MOTO=$$(scripts/install-moto) \
		$(CARGO) test --locked -p godwit-image --test repository -- --ignored

# A machine on an image of 4 GiB: how much of it is fetched until the guest works, and how much is sent when it moves; and
# what else takes long. Needs 16 GiB of storage.
.PHONY: test-images
test-images: guest
	$(CARGO) build --locked -p godwit-cli --features failpoints
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test image_disks -- --ignored --nocapture --test-threads 1

# QEMU and the virtual machine that tests run in it.
guest:
	scripts/install-deps
	scripts/install-qemu
	CARGO=$(CARGO) scripts/build-guest >/dev/null

# Simulated migrations with faults, and how often each fault and each state was hit.
sim:
	scripts/install-deps
	$(CARGO) run --release --locked -p godwit-sim -- run --seeds 6000

# What a node chooses for twelve guests beside every policy, in virtual time. Fails where it costs a tenth more.
sim-choice:
	scripts/install-deps
	$(CARGO) run --release --locked -p godwit-sim -- choose

# Whether the simulator finds each bug that it plants.
sim-plants:
	scripts/install-deps
	scripts/sim-plants

# A guest under load that moves three times with all of its memory following, whose memory then leaves its pool and goes
# back ten times; and QEMUs that answer too late meanwhile.
.PHONY: test-memory
test-memory: guest
	$(CARGO) build --locked -p godwit-cli --features failpoints
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test zero_copy -- --ignored --nocapture --test-threads 1

# Deaths of nodes and QEMUs in every phase of a move, moves that are cancelled, and nodes that are started again under
# a machine with a NIC and a client that checks what it gets; guests that reboot at any moment; and deaths of nodes under a
# machine without disks, at any moment. Needs root, for network namespaces.
.PHONY: test-nics
test-nics: guest
	$(CARGO) build --locked -p godwit-cli --features failpoints
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test vm_crash -- --ignored --nocapture --test-threads 1 nics:: endings::
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test diskless -- --ignored --nocapture --test-threads 1

# A machine of libvirt's with a NIC that a node serves. Needs root, for network namespaces.
.PHONY: test-libvirt
test-libvirt: guest
	scripts/install-libvirt
	$(CARGO) build --locked -p godwit-cli --features failpoints
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test libvirt_nics -- --ignored --nocapture --test-threads 1

# A NIC that a node serves, driven by DPDK's testpmd. Needs root, for network namespaces.
.PHONY: test-testpmd
test-testpmd: guest
	scripts/install-testpmd
	$(CARGO) build --locked -p godwit-cli --features failpoints
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test foreign_front_end -- --ignored --nocapture --test-threads 1

# Pools on a DAX device, in a virtual machine that has one.
.PHONY: test-dax
test-dax: guest
	scripts/test-dax

# The same guest while nodes and QEMUs are killed in each phase of a move, and while its memory follows: with its memory in
# a folder, in a part of a file, and pulled.
.PHONY: test-memory-deaths
test-memory-deaths: guest
	$(CARGO) build --locked -p godwit-cli --features failpoints
	GODWIT_BIN=$(CURDIR)/target/debug/godwit \
		$(CARGO) test --locked -p godwit-testkit --test vm_crash -- --ignored --nocapture --test-threads 1 \
		zero_copy post_copy
	GODWIT_BIN=$(CURDIR)/target/debug/godwit GODWIT_MEMORY_POOL=file \
		$(CARGO) test --locked -p godwit-testkit --test vm_crash zero_copy -- --ignored --nocapture --test-threads 1

# As many runs as you like: make soak SEEDS=200000 FIRST=1000000.
soak:
	scripts/install-deps
	$(CARGO) run --release --locked -p godwit-sim -- run --seeds $(SEEDS) --first $(FIRST)

# A Debian package, in target/package.
package:
	scripts/install-deps
	scripts/build-package

demo:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli -p godwit-testkit --bins
	target/release/godwit-demo

# A busy disk that is handed over at once and pulled afterwards, while both nodes are killed.
demo-leave:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli -p godwit-testkit --bins
	target/release/godwit-demo-leave

# A virtual machine that moves between two nodes while its guest works and checks.
demo-vm: guest
	$(CARGO) build --release --locked -p godwit-cli -p godwit-testkit --bins
	target/release/godwit-demo-vm

# A client outside that loses nothing while a machine with its NIC moves between two hosts. Needs root, for network
# namespaces.
demo-net: guest
	$(CARGO) build --release --locked -p godwit-cli -p godwit-testkit --bins
	target/release/godwit-demo-net

# Virtual machines of 1 GiB and 4 GiB under load that move between two nodes which map the same memory. Needs root,
# or a kernel that lets users hold pages, and 10 GiB in /dev/shm and memory.
demo-memory: guest
	$(CARGO) build --release --locked -p godwit-cli -p godwit-testkit --bins
	target/release/godwit-demo-memory

# The same guest moved with zero-copy memory and by sending its memory, in turns: docs/lab/memory.md. BENCH takes more
# options, such as --quick.
.PHONY: bench-memory
bench-memory: guest
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench --bins
	target/release/bench-memory $(BENCH)

# Unmodified RDMA programs that move between three virtual machines with soft-RoCE. BUILT=1 takes the programs that make test
# has built.
demo-rdma: demo-rdma-build
	target/debug/godwit-demo-rdma

demo-rdma-build:
	scripts/install-deps
	scripts/install-qemu
	scripts/build-rdma-guest >/dev/null
ifdef BUILT
	cp target/debug/deps/libgodwit_verbs.so target/debug/
else
	$(CARGO) build --locked -p godwit-verbs -p godwit-testkit -p godwit-cli --features godwit-cli/failpoints --lib --bin godwit --bin godwit-verbs --bin godwit-demo-rdma --bin godwit-verbs-client
endif

# The shortest proof of it, for a continuous-integration run: what is refused, programs and processes that each move once or twice,
# and programs of librdmacm that do not move.
test-rdma: demo-rdma-build
	target/debug/godwit-demo-rdma --only refusals --only "checked: shared" --only "checked: datagrams, shared" --only "without RDMA" --only write_bw --only "pingpong -e" \
		--only "programs: rping" --only "programs: ucmatose" --only "programs: udaddy" --only "programs: rstream"

# Debian's RDMA programs and rdma-core's own tests, with the library and without it, none of which moves.
.PHONY: test-rdma-programs
test-rdma-programs: demo-rdma-build
	target/debug/godwit-demo-rdma --only programs

# A node of the source, the destination or the partner is killed in each phase of a move. A quarter of an hour.
test-rdma-deaths: demo-rdma-build
	target/debug/godwit-demo-rdma --only "death: "

# The same of a container under runc, of the source's node and the destination's. Half an hour.
test-rdma-container-deaths: demo-rdma-build
	target/debug/godwit-demo-rdma --only "death in runc"

# Fifty moves of each pair of processes that check everything, in turns and both at once, over reliable connections, through
# memory windows and with datagrams, with lost packets. Three hours.
soak-rdma: demo-rdma-build
	target/debug/godwit-demo-rdma --only checked --moves 50 --loss 1

# What the RDMA library costs on the data path, in cycles, at a provider that does nothing.
bench-verbs:
	$(CARGO) build --release --locked -p godwit-verbs --lib --example null_provider --example overhead
	target/release/examples/overhead

# What a move costs RDMA programs, against queue pairs, messages and partners: docs/lab/rdma.md. BENCH takes options, such as
# --quick.
bench-rdma: bench-verbs
	scripts/install-deps
	scripts/install-qemu
	scripts/build-rdma-guest >/dev/null
	$(CARGO) build --release --locked -p godwit-verbs -p godwit-testkit -p godwit-cli -p godwit-bench --lib --bin godwit --bin godwit-verbs --bin godwit-verbs-client --bin bench-rdma
	target/release/bench-rdma $(BENCH)

# Godwit beside its peers, in less than ten minutes: bench/README.md. BENCH takes more options.
bench: bench-build
	target/release/godwit-bench quick $(BENCH)

# The same with every workload, rate and link: days, unless part of it is selected in BENCH.
bench-full: bench-build
	target/release/godwit-bench full $(BENCH)

# How long an idle disk takes, beside nbdcopy between two nbdkit servers.
bench-idle-copy:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench --bins
	target/release/idle-copy

# What the promise to the guest costs and brings on a crowded link, and on its own: bench/README.md.
bench-sla: bench-sla-build
	target/release/bench-sla compare --rounds $(ROUNDS)
	target/release/bench-sla auto

# How fast delayed writes may be flushed.
bench-sla-rate: bench-sla-build
	target/release/bench-sla rate --crowded-seconds 10 --crowded-percent 95

# What each policy costs and brings under load, alone and many at once. BENCH takes more options: BENCH=--quick takes
# three minutes.
bench-policies:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench --bins
	target/release/bench-policies $(BENCH)

# A disk over vhost-user-blk, beside qemu-storage-daemon.
bench-vhost:
	scripts/install-deps
	scripts/install-qemu
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench --bins
	target/release/bench-vhost

# A machine's network card under load and while the machine moves, beside QEMU's own and others: docs/lab/network.md.
# Needs root. Twenty minutes; BENCH=--quick takes four, and shows little more than that everything runs.
.PHONY: bench-net
bench-net:
	scripts/install-deps
	scripts/install-qemu
	scripts/install-net-peers
	scripts/build-net-guest >/dev/null
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench --bins
	target/release/bench-net $(BENCH)

# A disk that does not move, beside another build of godwit: make bench-sla-steady BASELINE=PATH
bench-sla-steady: bench-sla-build
	target/release/bench-sla steady --baseline $(BASELINE)

.PHONY: bench-build bench-sla-build
bench-build: bench-sla-build
	scripts/install-qemu

bench-sla-build:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli -p godwit-bench --bins

# How long a guest waits at most, and how long the rest takes, when thin disks of 1, 4 and 8 TiB move by each policy.
.PHONY: bench-thin
bench-thin:
	scripts/install-deps
	$(CARGO) build --release --locked -p godwit-cli
	GODWIT_BIN=$(CURDIR)/target/release/godwit \
		$(CARGO) test --locked -p godwit-testkit --test pulled_disks -- --ignored --nocapture many_tib

# How many guest writes a second the core decides.
bench-core:
	$(CARGO) bench --locked -p godwit-core

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	scripts/check-core-purity

fmt:
	$(CARGO) fmt

# Every parser that meets bytes from outside, for FUZZ_SECONDS each.
fuzz:
	fuzz/run $(FUZZ_SECONDS)

# Licences, advisories and sources of everything that is linked in.
deny:
	scripts/check-dependencies
