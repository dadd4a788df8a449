//! The commands `godwit vm protect`, `unprotect` and `failover`.

use std::time::Duration;

use godwit_api::text::format_bytes;
use godwit_api::{ProtectVm, ProtectionState, Vm, VmProtection};
use serde_json::json;

use crate::arguments::VmProtectArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::line::{Line, Matters};
use crate::show::output::Output;
use crate::show::progress::{ProgressLine, Status};

/// Interval of requests for the progress.
const POLL: Duration = Duration::from_millis(250);

/// Protects a VM, and waits until the backup may take the VM.
pub(super) async fn protect(
    client: &mut Client,
    arguments: VmProtectArguments,
    output: Output,
) -> Result<(), Failure> {
    let name = arguments.name;
    let request = ProtectVm {
        to: arguments.to,
        restart: arguments.restart,
        frequency: arguments.frequency,
        witness: arguments.witness,
        when_alone: arguments.when_alone,
        heartbeat_timeout_ms: arguments
            .heartbeat_timeout
            .map(|seconds| seconds.saturating_mul(1000)),
        pool: arguments.pool,
        max_bandwidth: arguments.max_bandwidth,
    };
    let _: Vm = client.post(&routes::vm_protection(&name), &request).await?;
    let mut progress = ProgressLine::new(output);
    let vm = loop {
        let vm: Vm = client.get(&routes::vm(&name)).await?;
        match &vm.protection {
            None => {
                progress.clear();
                return Err(Failure::new(format!(
                    "the protection of VM '{name}' was ended meanwhile"
                )));
            }
            Some(protection) if protection.state == ProtectionState::Protected => break vm,
            Some(protection) => progress.show(protection.state.name(), &status(&name, protection)),
        }
        tokio::time::sleep(POLL).await;
    };
    progress.clear();
    output.print(&vm, |vm| {
        format!("VM '{}' is protected by node '{}'", vm.name, request.to)
    })
}

pub(super) async fn unprotect(
    client: &mut Client,
    name: &str,
    force: bool,
    output: Output,
) -> Result<(), Failure> {
    client.delete(&routes::vm_unprotection(name, force)).await?;
    output.print(&json!({ "name": name }), |_| {
        format!("VM '{name}' is not protected any more")
    })
}

pub(super) async fn fail_over(
    client: &mut Client,
    name: &str,
    output: Output,
) -> Result<(), Failure> {
    client.order(&routes::vm_failover(name), &json!({})).await?;
    output.print(&json!({ "name": name }), |_| {
        format!("VM '{name}' is here now")
    })
}

fn status(name: &str, protection: &VmProtection) -> Status {
    let VmProtection {
        peer,
        bytes_total,
        bytes_done,
        ..
    } = protection;
    let total = *bytes_total;
    let mut line = Line::plain(match protection.state {
        ProtectionState::Syncing => format!("vm/{name}: copying its disks to {peer}"),
        state => format!("vm/{name}: {}", state.name()),
    });
    if total > 0 {
        let left = total.saturating_sub(*bytes_done);
        line = line.then(Matters::Left, format!("{} left", format_bytes(left)));
    }
    Status {
        line,
        done: (total > 0).then_some((*bytes_done, total)),
        note: protection.problem.clone(),
    }
}

/// Returns a protection in a sentence.
pub(super) fn sentence(protection: &VmProtection) -> String {
    let VmProtection { peer, term, .. } = protection;
    let decides = match (&protection.witness, protection.when_alone) {
        (Some(witness), _) => format!("witness {witness}"),
        (None, Some(when)) => format!("when alone {}", when.name()),
        (None, None) => String::new(),
    };
    let state = protection.state.name();
    let mut text = format!("{state}, other node {peer}, {decides}, term {term}");
    if let Some(figures) = &protection.checkpoints {
        let milliseconds = |us: u64| us as f64 / 1000.0;
        text.push_str(&format!(
            ", {:.0} checkpoints/s (stands still {:.1} ms, lag {:.1} ms)",
            figures.per_second,
            milliseconds(figures.pause_p50_us),
            milliseconds(figures.lag_p50_us),
        ));
    }
    if let Some(problem) = &protection.problem {
        text.push_str(&format!(": {problem}"));
    }
    text
}
