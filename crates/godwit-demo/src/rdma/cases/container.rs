//! Moves of containers under runc between guests: one without RDMA, and one in which a program of Debian's writes to a
//! partner meanwhile. A third one cannot move: every reason is named, and the container stays untouched.

use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::rdma::{
    Bed, Moved, Place, RdmaGuest, connected, move_container, preflight_container,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// The folder of bundles in each guest, with a folder for each container.
pub(crate) const BUNDLES: &str = "/run/bundles";
/// The address of the moving container.
pub(crate) const ALIAS: &str = "10.0.0.100";
const PROGRAM: &str = "ib_write_bw -d rxe0 -F -x 1 -s 65536 -n 6000";
/// Longest time for a program to end after its move.
const END: Duration = Duration::from_secs(300);
/// Start of a shell loop to wait for a condition in a guest.
const SEEN: &str = "for i in $(seq 600); do";

/// A move in a container.
type Moves = fn(&Bed) -> io::Result<Moved>;

/// The containers that move.
pub(crate) const MOVES: [(&str, Moves); 2] = [
    ("a container without RDMA", without_rdma),
    ("ib_write_bw in a container", with_rdma),
];

/// Prepares the guests to run containers.
pub(crate) fn prepare(bed: &Bed) -> io::Result<()> {
    for number in 1..=3 {
        // The mount would be the work of an init. CRIU's first check of the kernel after a boot takes long.
        bed.guest(number).must(
            "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; criu check >/dev/null 2>&1; true",
        )?;
    }
    Ok(())
}

/// Creates a bundle in a guest. The root file system is the guest's programs, with the container's own written files.
pub(crate) fn bundle(
    guest: &RdmaGuest,
    id: &str,
    script: &str,
    namespaces: &[&str],
) -> io::Result<()> {
    let all = ["CAP_IPC_LOCK", "CAP_NET_RAW"];
    let unlimited = json!({"type": "RLIMIT_MEMLOCK", "hard": u64::MAX, "soft": u64::MAX});
    let device = guest.must("stat -c '%Hr %Lr' /dev/infiniband/uverbs0")?;
    let numbers: Vec<u32> = device
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    let [major, minor] = numbers[..] else {
        return Err(io::Error::other(format!(
            "no numbers of a device: {device}"
        )));
    };
    let temporary = |path: &str, mode: &str| json!({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", mode, "size=65536k"]});
    let of_guest = |path: &str| json!({"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]});
    let settings = json!({
        "ociVersion": "1.0.2",
        "hostname": id,
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": ["sh", "-c", script],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LD_PRELOAD=/opt/godwit/libgodwit_verbs.so"],
            "cwd": "/",
            "capabilities": {"bounding": all, "effective": all, "permitted": all},
            "rlimits": [unlimited],
            "noNewPrivileges": true,
        },
        "root": {"path": "rootfs", "readonly": false},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            temporary("/dev", "mode=755"),
            temporary("/dev/shm", "mode=1777"),
            of_guest("/sys"), of_guest("/usr"), of_guest("/etc"), of_guest("/opt"),
        ],
        "linux": {
            "namespaces": namespaces.iter().map(|kind| json!({"type": kind})).collect::<Vec<_>>(),
            "devices": [{
                "path": "/dev/infiniband/uverbs0", "type": "c", "major": major, "minor": minor,
                "fileMode": 0o666, "uid": 0, "gid": 0,
            }],
            "resources": {"devices": [
                {"allow": false, "access": "rwm"},
                {"allow": true, "type": "c", "major": major, "access": "rw"},
            ]},
        },
    });
    guest
        .must(&format!(
            "mkdir -p {BUNDLES}/{id}/rootfs && cd {BUNDLES}/{id} && cat >config.json <<'END'\n{settings}\nEND\n\
             cd rootfs && mkdir -p proc dev sys usr etc opt && for d in bin sbin lib lib64; do ln -sfn usr/$d $d; done"
        ))
        .map(drop)
}

/// Starts a container; returns the first process.
pub(crate) fn start(guest: &RdmaGuest, id: &str) -> io::Result<u32> {
    let said = guest.must(&format!(
        "runc --log /run/{id}.error run --detach --bundle {BUNDLES}/{id} --pid-file /run/{id}.pid {id} </dev/null >/dev/null 2>&1 || \
         {{ cat /run/{id}.error; exit 1; }}; cat /run/{id}.pid"
    ))?;
    let parsed = said.trim().parse();
    parsed.map_err(|_| io::Error::other(format!("no process id in {said}")))
}

/// A container, as runc lists it.
#[derive(Deserialize)]
struct Listed {
    id: String,
    pid: u32,
    status: String,
}

fn listed(guest: &RdmaGuest, id: &str) -> io::Result<Option<Listed>> {
    let said = guest.must("runc list --format json 2>/dev/null")?;
    // Without containers runc prints `null`.
    let all: Option<Vec<Listed>> = serde_json::from_str(&said)
        .map_err(|error| io::Error::other(format!("runc listed {said:?}: {error}")))?;
    Ok(all.into_iter().flatten().find(|one| one.id == id))
}

/// Returns the container's process at the destination.
pub(crate) fn restored(guest: &RdmaGuest, id: &str) -> io::Result<u32> {
    let there = listed(guest, id)?.ok_or_else(|| {
        io::Error::other(format!("guest {} has no container {id}", guest.number()))
    })?;
    Ok(there.pid)
}

/// Returns the container's first process in this guest, if there is one, working or not.
pub(crate) fn exists(guest: &RdmaGuest, id: &str) -> io::Result<Option<u32>> {
    let there = listed(guest, id)?;
    Ok(there
        .filter(|one| one.status != "stopped")
        .map(|one| one.pid))
}

/// The namespaces of a moving container.
pub(crate) const OWN: &[&str] = &["pid", "ipc", "uts", "mount"];

/// Asks for a move of a container that cannot move.
pub(crate) fn refused(bed: &Bed) -> io::Result<Value> {
    let (source, destination) = (bed.guest(1), bed.guest(2));
    bundle(
        source,
        "refused",
        "exec sleep 1000",
        &["pid", "ipc", "uts", "mount", "network"],
    )?;
    let pid = start(source, "refused")?;
    let said = preflight_container(source, "refused", destination)?;
    let lives = source.run(&format!("[ -e /proc/{pid} ]"))?.status == 0;
    clean_up(bed)?;
    let reasons = [
        "has a network namespace of its own",
        "the destination has no bundle",
    ];
    let named = |reason: &&str| said.iter().filter(|one| one.contains(reason)).count() == 1;
    let as_expected = lives && said.len() == reasons.len() && reasons.iter().all(named);
    let case = "a container with a network of its own, and no bundle at the destination";
    Ok(json!({"case": case, "said": said, "as_expected": as_expected}))
}

/// Moves a container that counts into a file, which comes along. The container's 16 MiB of memory are copied meanwhile.
fn without_rdma(bed: &Bed) -> io::Result<Moved> {
    let (source, destination) = (bed.guest(1), bed.guest(2));
    for guest in [source, destination] {
        let script = "big=$(head -c 16777216 /dev/zero | tr '\\0' x); i=0; while :; do i=$((i+1)); echo $i >>/out.log; sleep 0.1; done";
        bundle(guest, "plain", script, OWN)?;
    }
    let first = start(source, "plain")?;
    let log = format!("{BUNDLES}/plain/rootfs/out.log");
    source.must(&format!(
        "{SEEN} [ $(wc -l <{log}) -ge 5 ] && exit 0; sleep 0.1; done; exit 1"
    ))?;
    let moved = move_container(source, "plain", destination, None, &log)?;
    restored(destination, "plain")?;
    if moved.pre_copied_bytes < 16 << 20 || !moved.warnings.is_empty() {
        let warnings = moved.warnings.join("; ");
        return Err(io::Error::other(format!(
            "{} bytes of its memory were copied while it worked: {warnings}",
            moved.pre_copied_bytes
        )));
    }
    if source.run(&format!("[ -e /proc/{first} ]"))?.status == 0 {
        return Err(io::Error::other("it runs at the source as well"));
    }
    let before: u64 = destination
        .must(&format!("wc -l <{log}"))?
        .trim()
        .parse()
        .unwrap_or(0);
    destination.must(&format!(
        "{SEEN} [ $(wc -l <{log}) -ge {} ] && exit 0; sleep 0.1; done; exit 1",
        before + 5
    ))?;
    // Every number once and in order: the container went on where it stopped.
    destination.must(&format!("seq $(wc -l <{log}) | cmp - {log}"))?;
    Ok(moved)
}

/// Moves the server of perftest's writes; the client at the third guest stays.
fn with_rdma(bed: &Bed) -> io::Result<Moved> {
    let (source, destination, other) = (bed.guest(1), bed.guest(2), bed.guest(3));
    for guest in [source, destination] {
        bundle(
            guest,
            "writer",
            &format!("exec {PROGRAM} >/out.log 2>&1"),
            OWN,
        )?;
    }
    source.must(&format!(
        "ip addr add {ALIAS}/24 dev eth0; arping -q -U -c 1 -I eth0 {ALIAS} >/dev/null 2>&1; true"
    ))?;
    let pid = start(source, "writer")?;
    source.must(&format!(
        "{SEEN} ss -ltn | grep -q ':18515' && exit 0; sleep 0.1; done; exit 1"
    ))?;
    let client = format!("env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so {PROGRAM} {ALIAS}");
    let client = other.background("client", &client)?;
    let (server, client) = (
        Place { guest: source, pid },
        Place {
            guest: other,
            pid: client,
        },
    );
    connected(server)?;
    connected(client)?;
    let log = format!("{BUNDLES}/writer/rootfs/out.log");
    let moved = move_container(source, "writer", destination, Some(ALIAS), &log)?;
    let there = restored(destination, "writer")?;
    ended(destination, there, &log)?;
    ended(other, client.pid, "/run/client.log")?;
    Ok(moved)
}

/// Waits until the process has ended, and judges perftest's result below the header.
fn ended(guest: &RdmaGuest, pid: u32, log: &str) -> io::Result<()> {
    let began = Instant::now();
    let gone = format!("[ ! -e /proc/{pid} ] || grep -q '^State:.Z' /proc/{pid}/status");
    while guest.run(&gone)?.status != 0 {
        if began.elapsed() > END {
            let said = guest.run(&format!("cat {log}"))?.text;
            let text = format!("guest {}'s side still runs; it said {said}", guest.number());
            return Err(io::Error::other(text));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    let said = guest.must(&format!("cat {log}"))?;
    let result = said
        .lines()
        .skip_while(|line| !line.contains("#bytes"))
        .nth(1);
    let number = |line: &str| {
        line.trim()
            .starts_with(|first: char| first.is_ascii_digit())
    };
    let bad = ["ailed", "rror"].iter().any(|word| said.contains(word));
    if result.is_some_and(number) && !bad {
        return Ok(());
    }
    let text = format!("guest {}'s side ended with: {said}", guest.number());
    Err(io::Error::other(text))
}

/// Ends all containers.
pub(crate) fn clean_up(bed: &Bed) -> io::Result<()> {
    for number in 1..=3 {
        bed.guest(number).run(&format!(
            "for id in refused plain writer checker; do runc delete --force $id; done; pkill -9 -f '^ib'; \
             ip addr del {ALIAS}/24 dev eth0; nft flush ruleset; rm -rf {BUNDLES} /run/client.log; true"
        ))?;
    }
    Ok(())
}
