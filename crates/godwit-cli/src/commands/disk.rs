//! The command `godwit disk`.

use std::path::Path;

use godwit_api::{
    AbandonMissing, ClaimDisk, CreateDisk, Disk, DiskState, ExportDisk, GuestLatency, ImportDisk,
    IoCounters, Job, ResizeDisk,
};
use serde_json::json;

use super::job;
use crate::arguments::{DiskCommand, Format, Switch};
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, facts, table};
use godwit_api::text::{format_bytes, format_micros};

pub(crate) async fn run(
    command: DiskCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        DiskCommand::Create {
            name,
            size,
            path,
            format,
            preallocate,
            image,
            prefetch,
        } => {
            let path = path.map(|path| node_path(&path, client)).transpose()?;
            let request = CreateDisk {
                name,
                size_bytes: size,
                path,
                format: format.map(Into::into),
                preallocate,
                image,
                prefetch: prefetch == Switch::On,
            };
            create(client, &request, output).await
        }
        DiskCommand::Import { name, file, format } => {
            let path = node_path(&file, client)?;
            import(client, name, path, format, output).await
        }
        DiskCommand::Export { name, file } => {
            let path = node_path(&file, client)?;
            export(client, &name, path, output).await
        }
        DiskCommand::List => {
            let disks: Vec<Disk> = client.get(routes::DISKS).await?;
            output.print(&disks, |disks| list(disks))
        }
        DiskCommand::Show { name } => {
            let disk: Disk = client.get(&routes::disk(&name)).await?;
            output.print(&disk, show)
        }
        DiskCommand::Rm { name, force } => {
            client.delete(&routes::disk_removal(&name, force)).await?;
            output.print(&json!({ "name": name }), |_| {
                format!("removed disk '{name}'")
            })
        }
        DiskCommand::Attach { name, tcp } => attach(client, &name, tcp, output).await,
        DiskCommand::Resize { name, size } => {
            let request = ResizeDisk { size_bytes: size };
            let disk: Disk = client.post(&routes::disk_resize(&name), &request).await?;
            output.print(&disk, resized)
        }
        DiskCommand::Abandon { name, lost } => {
            // Without `lost` the node refuses, and tells the data that would be lost.
            let request = AbandonMissing { lost };
            let disk: Disk = client.post(&routes::disk_abandon(&name), &request).await?;
            let told = format!("disk '{name}' goes on without what it lacks: reads of that fail");
            output.print(&disk, |_| told)
        }
        DiskCommand::Claim { name, force } => {
            // Without `force` the node refuses, and names the other node.
            let request = ClaimDisk { force };
            let disk: Disk = client.post(&routes::disk_claim(&name), &request).await?;
            output.print(&disk, |_| format!("this node serves disk '{name}' now"))
        }
    }
}

async fn create(client: &mut Client, request: &CreateDisk, output: Output) -> Result<(), Failure> {
    let disk: Disk = client.post(routes::DISKS, request).await?;
    for warning in &disk.warnings {
        output.say(&format!("warning: {warning}"));
    }
    output.print(&disk, |disk| {
        let size = format_bytes(disk.size_bytes);
        format!("created disk '{}' of {size}", disk.name)
    })
}

async fn import(
    client: &mut Client,
    name: String,
    path: String,
    format: Option<Format>,
    output: Output,
) -> Result<(), Failure> {
    let format = format.map(Into::into);
    let request = ImportDisk { name, path, format };
    let started: Job = client.post(routes::IMPORTS, &request).await?;
    job::wait(client, started, output).await?;
    let disk: Disk = client.get(&routes::disk(&request.name)).await?;
    output.print(&disk, |disk| {
        let size = format_bytes(disk.size_bytes);
        format!("imported disk '{}' of {size}", disk.name)
    })
}

async fn export(
    client: &mut Client,
    name: &str,
    path: String,
    output: Output,
) -> Result<(), Failure> {
    let request = ExportDisk { path };
    let started: Job = client.post(&routes::disk_export(name), &request).await?;
    let ended = job::wait(client, started, output).await?;
    output.print(&ended, |job| {
        format!("exported disk '{}' to {}", job.disk, job.path)
    })
}

async fn attach(client: &mut Client, name: &str, tcp: bool, output: Output) -> Result<(), Failure> {
    let disk: Disk = client.get(&routes::disk(name)).await?;
    let uri = attach_uri(&disk, tcp || !client.is_local())?;
    if uri.contains("//0.0.0.0:") || uri.contains("//[::]:") {
        output.say("note: the node listens on every address; name its host instead");
    }
    output.print(&json!({ "uri": uri }), |_| uri.clone())
}

fn resized(disk: &Disk) -> String {
    let size = format_bytes(disk.size_bytes);
    format!(
        "disk '{}' has {size} now; a virtual machine on it sees that when it is started anew",
        disk.name
    )
}

/// Returns a path as the node understands it: made absolute here for a local node, and required to be absolute for a
/// remote node.
pub(super) fn node_path(path: &Path, client: &Client) -> Result<String, Failure> {
    let shown = path.display();
    if !client.is_local() && path.is_relative() {
        return Err(Failure::usage(format!("{shown} must be an absolute path"))
            .hint("the file is read and written on the node's host, which is not this one"));
    }
    let absolute = std::path::absolute(path)
        .map_err(|error| Failure::caused(format!("cannot make {shown} absolute"), &error))?;
    absolute
        .into_os_string()
        .into_string()
        .map_err(|path| Failure::usage(format!("{} is not UTF-8", Path::new(&path).display())))
}

/// Returns the address for a new client. Clients that were attached when the disk left stay, but the node takes no new
/// clients for the disk.
fn attach_uri(disk: &Disk, tcp: bool) -> Result<String, Failure> {
    if let (DiskState::Departed, Some(node)) = (disk.state, &disk.moved_to) {
        let name = &disk.name;
        return Err(
            Failure::new(format!("disk '{name}' is on node '{node}' now"))
                .hint(format!("ask there: godwit disk attach {name}")),
        );
    }
    let matches = |uri: &&String| uri.starts_with("nbd+unix:") != tcp;
    match disk.nbd.iter().find(matches) {
        Some(uri) => Ok(uri.clone()),
        None if tcp => Err(
            Failure::new(format!("disk '{}' is not served over TCP", disk.name))
                .hint("start the node with --nbd-listen ADDR:PORT"),
        ),
        None => Err(
            Failure::new(format!("disk '{}' cannot be attached here", disk.name))
                .hint(format!("see why: godwit disk show {}", disk.name)),
        ),
    }
}

fn list(disks: &[Disk]) -> String {
    let row = |disk: &Disk| {
        let place = match (disk.state, &disk.moved_to) {
            (DiskState::Departed, Some(node)) => format!("on {node}"),
            (DiskState::Accepted | DiskState::Relinquished, _) => {
                let other = disk.counterpart.as_deref().unwrap_or("the other node");
                format!("in doubt: asks {other}")
            }
            _ => disk.problem.clone().unwrap_or_default(),
        };
        [
            disk.name.clone(),
            format_bytes(disk.size_bytes),
            disk.state.name().to_owned(),
            disk.clients.to_string(),
            lacks(disk),
            owes(disk),
            place,
        ]
    };
    let empty = "no disks: make one with godwit disk create NAME --size SIZE";
    table(
        ["NAME", "SIZE", "STATE", "CLIENTS", "LACKS", "OWES", "NOTE"],
        disks.iter().map(row),
        empty,
    )
}

/// Returns the missing part of a disk that is served here, and its place.
fn lacks(disk: &Disk) -> String {
    let place = match &disk.image {
        Some(image) if image.fetching => format!("image '{}'", image.name),
        _ => disk.counterpart.clone().unwrap_or_default(),
    };
    let lacks = disk.missing_bytes.filter(|bytes| *bytes > 0);
    lacks.map_or_else(
        || String::from("-"),
        |bytes| format!("{} at {place}", format_bytes(bytes)),
    )
}

/// Returns the node that still needs a part of a departed disk.
fn owes(disk: &Disk) -> String {
    let owner = disk.moved_to.as_ref().filter(|_| disk.owes);
    owner.map_or_else(|| String::from("-"), |owner| format!("a part to {owner}"))
}

/// Returns the image that a disk was created from, and the part that is not fetched yet.
fn created_from(disk: &Disk) -> Option<String> {
    let image = disk.image.as_ref()?;
    let content: String = image.content.chars().take(12).collect();
    let left = disk.missing_bytes.filter(|_| image.fetching).map_or_else(
        || String::from("all of it is here"),
        |left| format!("{} to be fetched", format_bytes(left)),
    );
    Some(format!("image '{}' ({content}), {left}", image.name))
}

/// Returns the requests of the last seconds; `None` if there were none.
fn latency(latency: &GuestLatency) -> Option<String> {
    (latency.iops > 0.0).then(|| {
        format!(
            "{:.0} a second; p50 {}, p99 {}, p99.99 {}, max {}",
            latency.iops,
            format_micros(latency.p50_us),
            format_micros(latency.p99_us),
            format_micros(latency.p9999_us),
            format_micros(latency.max_us)
        )
    })
}

fn requests(io: &IoCounters) -> String {
    format!(
        "{} reads ({}), {} writes ({}), {} flushes, {} discards, {} forwarded, {} errors",
        io.reads,
        format_bytes(io.read_bytes),
        io.writes,
        format_bytes(io.written_bytes),
        io.flushes,
        io.discards,
        io.forwarded,
        io.errors
    )
}

fn show(disk: &Disk) -> String {
    let size = format_bytes(disk.size_bytes);
    let compressed = (disk.io.compressed_from_bytes > 0).then(|| {
        let from = format_bytes(disk.io.compressed_from_bytes);
        format!("{from} to {}", format_bytes(disk.io.compressed_to_bytes))
    });
    let open = !disk.nbd.is_empty() && disk.state != DiskState::Departed;
    let attach = open.then(|| disk.nbd.join("\n             "));
    facts([
        ("name", Some(disk.name.clone())),
        (
            "state",
            Some(format!("{}: {}", disk.state.name(), disk.status)),
        ),
        ("problem", disk.problem.clone()),
        (
            "warning",
            (!disk.warnings.is_empty()).then(|| disk.warnings.join("; ")),
        ),
        ("size", Some(format!("{size} ({} bytes)", disk.size_bytes))),
        ("used", disk.allocated_bytes.map(format_bytes)),
        ("image", Some(disk.path.clone())),
        ("created from", created_from(disk)),
        ("on", disk.moved_to.clone()),
        (
            "kept",
            disk.kept.then(|| {
                "as the disk was when it left: it comes back with what was written since".to_owned()
            }),
        ),
        ("migration", disk.migration.clone()),
        ("clients", Some(disk.clients.to_string())),
        ("requests", latency(&disk.latency)),
        ("since start", Some(requests(&disk.io))),
        ("compressed", compressed),
        ("attach at", attach),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        Disk {
            name: "d".to_owned(),
            size_bytes: 1 << 30,
            allocated_bytes: None,
            path: "/x".to_owned(),
            managed: true,
            state: DiskState::Serving,
            status: "this node serves it".to_owned(),
            epoch: 1,
            counterpart: None,
            moved_to: None,
            clients: 2,
            serves: true,
            migration: None,
            nbd: vec!["nbd+unix:///d?socket=/n.sock".to_owned()],
            io: IoCounters::default(),
            latency: GuestLatency::default(),
            missing_bytes: None,
            owes: false,
            kept: false,
            image: None,
            lacks_room: false,
            problem: None,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn the_address_is_the_one_that_was_asked_for() {
        let mut disk = disk();
        assert_eq!(
            attach_uri(&disk, false).unwrap(),
            "nbd+unix:///d?socket=/n.sock"
        );
        let failure = attach_uri(&disk, true).unwrap_err();
        assert!(failure.hint.unwrap().contains("--nbd-listen"));
        disk.nbd.push("nbds://h:10809/d".to_owned());
        assert_eq!(attach_uri(&disk, true).unwrap(), "nbds://h:10809/d");
        disk.nbd.clear();
        assert!(attach_uri(&disk, false).is_err());
    }

    #[test]
    fn a_disk_that_left_says_where_it_is() {
        let mut disk = disk();
        disk.state = DiskState::Departed;
        disk.moved_to = Some("b".to_owned());
        assert!(
            !show(&disk).contains("nbd+unix"),
            "new clients are turned away"
        );
        let told = attach_uri(&disk, false).unwrap_err().to_string();
        assert!(told.contains("on node 'b'"), "{told}");
        let text = list(&[disk]);
        let row = text.lines().nth(1).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>(),
            ["d", "1.00", "GiB", "departed", "2", "-", "-", "on", "b"]
        );
    }

    #[test]
    fn a_disk_in_doubt_is_listed_as_such() {
        for state in [DiskState::Accepted, DiskState::Relinquished] {
            let doubted = Disk {
                state,
                counterpart: Some("b".to_owned()),
                ..disk()
            };
            let text = list(&[doubted]);
            assert!(text.contains("in doubt: asks b"), "{text}");
        }
    }

    #[test]
    fn showing_an_idle_disk_makes_up_no_latency() {
        let text = show(&disk());
        assert!(text.contains("serving: this node serves it"), "{text}");
        assert!(!text.contains("p99"), "{text}");
    }
}
