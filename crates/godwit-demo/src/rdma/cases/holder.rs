//! A process that only holds a device. The process has opened the device, registered memory and made queues, and waits
//! for a client on a TCP socket. Godwit's library is not in use; CRIU's plugin alone makes the move possible.

use std::io;

use godwit_testkit::rdma::Bed;
use serde_json::{Value, json};

/// Dumps the process at guest 1 without the plugin, which fails, and with the plugin, and restores the process at guest
/// 2.
pub(crate) fn move_holder(bed: &Bed) -> io::Result<Value> {
    let (source, destination) = (bed.guest(1), bed.guest(2));
    let pid = source.background("holder", "ibv_rc_pingpong -d rxe0 -g 1")?;
    source.must("until ss -ltn | grep -q :18515; do sleep 0.05; done")?;
    let dump = |options: &str| {
        source.run(&format!(
            "rm -rf /run/image; mkdir /run/image; criu dump -t {pid} -D /run/image -o dump.log {options} || \
             {{ grep -a Error /run/image/dump.log; exit 1; }}"
        ))
    };
    let refused_without_plugin = dump("")?.status != 0;
    let dumped = dump("-L /opt/godwit/plugins")?;
    if dumped.status != 0 {
        return Err(io::Error::other(format!(
            "CRIU refused the holder with the plugin: {}",
            dumped.text
        )));
    }
    destination.must(
        "rm -f /run/socat.status; (setsid socat -u TCP-LISTEN:8000,reuseaddr EXEC:'tar -xf - -C /'; \
         echo $? >/run/socat.status) >/dev/null 2>&1 & until ss -ltn | grep -q :8000; do sleep 0.02; done",
    )?;
    source.must(&format!(
        "tar -C / -cf - run/image run/holder.log | socat -u - TCP:{}:8000",
        destination.address()
    ))?;
    destination.must(
        "until [ -s /run/socat.status ]; do sleep 0.02; done; rm /run/socat.status; \
         criu restore -D /run/image -o restore.log -L /opt/godwit/plugins -d || \
         { grep -a Error /run/image/restore.log; exit 1; }",
    )?;
    // The process runs at the destination: the socket listens, the process holds the device, and the source is rid of
    // the process.
    let alive = destination.run(&format!(
        "ss -ltnp | grep -q ':18515.*pid={pid},' && ls -l /proc/{pid}/fd | grep -q uverbs0"
    ))?;
    let gone = source.run(&format!(
        "[ ! -e /proc/{pid} ] || grep -q '^State:.Z' /proc/{pid}/status"
    ))?;
    destination.run(&format!("kill -9 {pid}"))?;
    Ok(json!({
        "refused_without_plugin": refused_without_plugin,
        "restored_with_plugin": alive.status == 0 && gone.status == 0,
    }))
}
