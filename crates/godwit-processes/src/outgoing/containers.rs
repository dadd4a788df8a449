//! Moves of containers: the process that moves with its RDMA connections, and the container's obstacles.

use std::sync::Arc;

use godwit_verbs::control;

use super::preparing::chosen::Chosen;
use crate::Processes;
use crate::host::criu;
use crate::host::runc::{self, Container, Listed};
use godwit_api::{ErrorBody, ErrorCode, MigrateContainer, MigrateProcess, ProcessMigration};
use godwit_context::blocking;

/// Moves a container to another node. Answers once no obstacle was found.
///
/// # Errors
/// All obstacles in one message; nothing has changed then.
pub async fn migrate_container(
    processes: &Arc<Processes>,
    id: &str,
    request: MigrateContainer,
) -> Result<ProcessMigration, ErrorBody> {
    processes.context.check_open()?;
    crate::check_enabled(processes)?;
    let conflict = |text: String| ErrorBody::new(ErrorCode::Conflict, text);
    let listed = runc::named(id).await.map_err(conflict)?;
    let listed = listed.ok_or_else(|| {
        let shown: String = id.chars().take(128).collect();
        let text = format!("this host has no container {shown:?} under runc");
        ErrorBody::new(ErrorCode::NotFound, text).hint("see 'godwit container list'")
    })?;
    if listed.pid == 0 {
        let text = format!("container {id} is {}: nothing of it runs", listed.status);
        return Err(conflict(text));
    }
    let chosen = choose(listed).await?;
    let MigrateContainer { to, options } = request;
    let request = MigrateProcess {
        to,
        pre_setup: false,
        options,
    };
    super::start(processes, chosen, request).await
}

/// Returns the subject of a container's move, with its obstacles.
///
/// # Errors
/// The container's users of RDMA, or CRIU's version, are unreadable.
pub(super) async fn choose(listed: Listed) -> Result<Chosen, ErrorBody> {
    let failed = |text: String| ErrorBody::new(ErrorCode::Conflict, text);
    let mut reasons = runc::reasons(&listed).await;
    let (id, init) = (listed.id, listed.pid);
    let inside = users(init).await?;
    if inside.len() > 1 {
        let numbers: Vec<String> = inside.iter().map(u32::to_string).collect();
        reasons.push(format!(
            "processes {} of container {id} use RDMA, and at most one of a container may",
            numbers.join(", ")
        ));
    }
    reasons.extend(runc::without_library(&id, init, &inside));
    let pid = inside.first().copied().unwrap_or(init);
    let number = runc::number_inside(pid)
        .map_err(|error| failed(format!("process {pid} cannot be read: {error}")))?;
    let criu = criu::version().await.map_err(failed)?;
    let container = Container {
        id,
        bundle: listed.bundle,
        init,
        criu,
        number,
    };
    if !container.is_sound() {
        reasons.push("the container's name or bundle is of a kind that does not move".to_owned());
    }
    Ok(Chosen {
        pid,
        container: Some(container),
        plain: inside.is_empty(),
        reasons,
    })
}

/// Returns the processes in a container that use the library and have opened a device.
///
/// # Errors
/// The kernel's lists cannot be read.
pub async fn users(init: u32) -> Result<Vec<u32>, ErrorBody> {
    let cannot = |error: std::io::Error| {
        ErrorBody::new(
            ErrorCode::Internal,
            format!("cannot list the container's processes: {error}"),
        )
    };
    let found = blocking(move || {
        let members = runc::members(init)?;
        let using = control::processes()?;
        Ok(using
            .into_iter()
            .filter(|pid| members.contains(pid))
            .collect())
    });
    found.await?.map_err(cannot)
}
