//! What moves: a process, or a container with the process in it that has RDMA connections; and what of those that come along
//! stands in the way.

use std::sync::Arc;

use godwit_verbs::control;

use crate::node::{Node, blocking};
use crate::processes::host::criu;
use crate::processes::host::family::Users;
use crate::processes::host::runc::{self, Container, Listed};
use godwit_api::{ErrorBody, ErrorCode, MigrateContainer, MigrateProcess, ProcessMigration};

/// What is to move.
#[derive(Debug)]
pub(super) struct Chosen {
    /// The process.
    pub(super) pid: u32,
    /// The container that it runs in.
    pub(super) container: Option<Container>,
    /// Whether nothing of it uses RDMA.
    pub(super) plain: bool,
    /// What of the container stands in the way, one sentence each.
    pub(super) reasons: Vec<String>,
}

impl Chosen {
    /// A process with those that descend from it.
    ///
    /// # Errors
    /// One sentence: who uses RDMA cannot be read.
    pub(super) async fn process(pid: u32) -> Result<Self, String> {
        let found = blocking(move || Users::of(pid)).await;
        let users = found
            .map_err(|error| error.message)?
            .map_err(|error| format!("whether process {pid} uses RDMA cannot be read: {error}"))?;
        Ok(Self {
            pid,
            container: None,
            plain: users.is_empty(),
            reasons: users.reasons(pid),
        })
    }

    /// The same, as it is now.
    ///
    /// # Errors
    /// One sentence: it is another one by now.
    pub(super) async fn again(&self) -> Result<Self, String> {
        let Some(container) = &self.container else {
            let chosen = Self::process(self.pid).await?;
            if chosen.plain == self.plain {
                return Ok(chosen);
            }
            return Err(format!(
                "whether process {} uses RDMA has changed",
                self.pid
            ));
        };
        let name = self.name();
        let listed = runc::named(&container.id).await?;
        let listed = listed.filter(|listed| listed.pid == container.init);
        let listed = listed.ok_or_else(|| format!("{name} has ended"))?;
        let chosen = choose(listed).await.map_err(|error| error.message)?;
        if (chosen.pid, chosen.plain) == (self.pid, self.plain) {
            return Ok(chosen);
        }
        Err(format!("which process of {name} uses RDMA has changed"))
    }

    /// What it is called in what is said.
    pub(super) fn name(&self) -> String {
        name_of(self.pid, self.container.as_ref())
    }
}

/// What a process, or the container that it runs in, is called in what is said.
pub(super) fn name_of(pid: u32, container: Option<&Container>) -> String {
    match container {
        None => format!("process {pid}"),
        Some(container) => format!("container {}", container.id),
    }
}

/// Moves a container to another node. Answers once nothing is found that stands in the way.
///
/// # Errors
/// All that does, in one message; nothing was touched then.
pub(crate) async fn migrate_container(
    node: &Arc<Node>,
    id: &str,
    request: MigrateContainer,
) -> Result<ProcessMigration, ErrorBody> {
    node.check_open()?;
    crate::processes::check_enabled(node)?;
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
    let MigrateContainer {
        to,
        address,
        files,
        pre_copy,
    } = request;
    let request = MigrateProcess {
        to,
        address,
        files,
        pre_copy,
        pre_setup: false,
    };
    super::start(node, chosen, request).await
}

async fn choose(listed: Listed) -> Result<Chosen, ErrorBody> {
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

/// The processes in a container that use the library and have opened a device.
///
/// # Errors
/// The kernel's lists cannot be read.
pub(crate) async fn users(init: u32) -> Result<Vec<u32>, ErrorBody> {
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
