//! A trial of QEMU's own checkpoints, COLO, with the QEMU at hand: two QEMUs in one network namespace, set up as QEMU's
//! documentation of COLO says, without disks.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use godwit_testkit::process::Process;
use serde_json::{Value, json};

use crate::common::interrupt;
use crate::common::qmp::Qmp;
use crate::net::Site;

/// Time that a guest has to boot, and COLO to take checkpoints.
const BOOTS: Duration = Duration::from_secs(15);
const TRIAL: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(200);
/// Time between two checkpoints that COLO is asked for, in milliseconds.
const DELAY_MS: u32 = 50;
const CARD: &str = "-netdev user,id=card -device rtl8139,netdev=card,romfile=";
const PRIMARY: &str = "-chardev socket,id=mirror,host=127.0.0.1,port=9003,server=on,wait=off \
    -chardev socket,id=secondary,host=127.0.0.1,port=9004,server=on,wait=off \
    -chardev socket,id=ours,host=127.0.0.1,port=9001,server=on,wait=off \
    -chardev socket,id=ours-in,host=127.0.0.1,port=9001 \
    -chardev socket,id=out,host=127.0.0.1,port=9005,server=on,wait=off \
    -chardev socket,id=out-in,host=127.0.0.1,port=9005 \
    -object filter-mirror,id=m,netdev=card,queue=tx,outdev=mirror \
    -object filter-redirector,id=r0,netdev=card,queue=rx,indev=out \
    -object filter-redirector,id=r1,netdev=card,queue=rx,outdev=ours \
    -object iothread,id=compares \
    -object colo-compare,id=compare,primary_in=ours-in,secondary_in=secondary,outdev=out-in,iothread=compares";
const SECONDARY: &str = "-chardev socket,id=mirror,host=127.0.0.1,port=9003 \
    -chardev socket,id=primary,host=127.0.0.1,port=9004 \
    -object filter-redirector,id=r0,netdev=card,queue=tx,indev=mirror \
    -object filter-redirector,id=r1,netdev=card,queue=rx,outdev=primary \
    -object filter-rewriter,id=rewriter,netdev=card,queue=all \
    -incoming tcp:127.0.0.1:9998";

/// Tries COLO, and returns the outcome in words with what QEMU said.
pub(super) fn trial(site: &Site) -> io::Result<Value> {
    let mut primary = Side::start(site, "colo-primary", PRIMARY)?;
    let mut secondary = Side::start(site, "colo-secondary", SECONDARY)?;
    interrupt::sleep(BOOTS)?;
    let capabilities = json!({"capabilities": [{"capability": "x-colo", "state": true}]});
    for side in [&mut secondary, &mut primary] {
        side.qmp.call("migrate-set-capabilities", &capabilities)?;
    }
    let delay = json!({"x-checkpoint-delay": DELAY_MS});
    primary.qmp.call("migrate-set-parameters", &delay)?;
    let uri = json!({"uri": "tcp:127.0.0.1:9998"});
    primary.qmp.call("migrate", &uri)?;
    let until = Instant::now() + TRIAL;
    let mut outcome = "its primary took no checkpoint";
    while Instant::now() < until {
        interrupt::sleep(LOOK)?;
        let Some(mode) = primary.colo_mode() else {
            outcome = "its primary ended";
            break;
        };
        if secondary.colo_mode().is_none() {
            outcome = "its secondary ended";
            break;
        }
        if mode == "primary" {
            outcome = "it ran";
        } else if outcome == "it ran" {
            outcome = "it ran and ended";
            break;
        }
    }
    let last = |side: &Side| std::fs::read_to_string(&side.log).unwrap_or_default();
    let said = last(&primary) + &last(&secondary);
    let said: Vec<&str> = said
        .lines()
        .filter(|line| !line.contains("info: "))
        .collect();
    Ok(json!({"outcome": outcome, "said": said}))
}

struct Side {
    qmp: Qmp,
    log: PathBuf,
    _process: Process,
}

impl Side {
    fn start(site: &Site, name: &str, options: &str) -> io::Result<Self> {
        let file = |extension: &str| site.directory().join(format!("{name}.{extension}"));
        let (monitor, log) = (file("monitor"), file("log"));
        let shown = |path: &Path| path.display().to_string();
        let mut command = site.hosts()[0].command();
        command.args([
            "qemu-system-x86_64",
            "-accel",
            "tcg",
            "-m",
            "192",
            "-nodefaults",
            "-display",
            "none",
        ]);
        command.args([
            "-kernel",
            &shown(&site.kernel()),
            "-initrd",
            &shown(&site.initramfs()),
        ]);
        command.args([
            "-append",
            "loglevel=0",
            "-qmp",
            &format!("unix:{},server=on,wait=off", shown(&monitor)),
        ]);
        command
            .args(CARD.split_whitespace())
            .args(options.split_whitespace());
        let messages = std::fs::File::create(&log)?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages);
        let process = Process::spawn(&mut command)?;
        Ok(Self {
            qmp: Qmp::connect(&monitor)?,
            log,
            _process: process,
        })
    }

    /// Returns the side's part in COLO; nothing if QEMU does not answer any more.
    fn colo_mode(&mut self) -> Option<String> {
        let status = self.qmp.call("query-colo-status", &json!({})).ok()?;
        Some(status["mode"].as_str().unwrap_or_default().to_owned())
    }
}
