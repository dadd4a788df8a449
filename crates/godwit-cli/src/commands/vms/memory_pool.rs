//! The command `godwit memory-pool`.

use godwit_api::{FormatMemoryPool, MemoryPool, MemorySegment};

use crate::arguments::MemoryPoolCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, facts, table};
use godwit_api::text::format_bytes;

pub(crate) async fn run(
    command: MemoryPoolCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        MemoryPoolCommand::List => {
            let pools: Vec<MemoryPool> = client.get(routes::MEMORY_POOLS).await?;
            output.print(&pools, |pools| list(pools))
        }
        MemoryPoolCommand::Show { name } => {
            let pool: MemoryPool = client.get(&routes::memory_pool(&name)).await?;
            output.print(&pool, show)
        }
        MemoryPoolCommand::Format { name, overwrite } => {
            let request = FormatMemoryPool { overwrite };
            let route = routes::memory_pool_format(&name);
            client.order(&route, &request).await?;
            let pool: MemoryPool = client.get(&routes::memory_pool(&name)).await?;
            output.print(&pool, show)
        }
    }
}

fn size(bytes: Option<u64>) -> String {
    bytes.map(format_bytes).unwrap_or_default()
}

fn list(pools: &[MemoryPool]) -> String {
    let row = |pool: &MemoryPool| {
        [
            pool.name.clone(),
            size(pool.bytes),
            size(pool.free_bytes),
            pool.segments.len().to_string(),
            pool.folder.clone(),
            pool.problem.clone().unwrap_or_default(),
        ]
    };
    let empty = "this node has no memory pools: start it with --memory-pool NAME=PATH";
    let head = ["NAME", "SIZE", "FREE", "MACHINES", "PATH", "NOTE"];
    table(head, pools.iter().map(row), empty)
}

fn show(pool: &MemoryPool) -> String {
    let row = |segment: &MemorySegment| {
        [
            segment.vm.clone(),
            size(segment.bytes),
            size(segment.offset),
            segment.owner.clone().unwrap_or_default(),
            segment
                .epoch
                .map(|epoch| epoch.to_string())
                .unwrap_or_default(),
            segment.problem.clone().unwrap_or_default(),
        ]
    };
    let head = facts([
        ("name", Some(pool.name.clone())),
        ("path", Some(pool.folder.clone())),
        ("size", pool.bytes.map(format_bytes)),
        ("free", pool.free_bytes.map(format_bytes)),
        ("problem", pool.problem.clone()),
    ]);
    let empty = "no machine's memory is in it";
    let names = ["VM", "SIZE", "AT", "OWNER", "EPOCH", "NOTE"];
    format!(
        "{head}\n\n{}",
        table(names, pool.segments.iter().map(row), empty)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_shows_whose_memory_is_in_it() {
        let pool = MemoryPool {
            name: "cxl".to_owned(),
            folder: "/mnt/cxl".to_owned(),
            bytes: Some(4 << 30),
            free_bytes: Some(1 << 30),
            segments: vec![MemorySegment {
                vm: "web".to_owned(),
                bytes: Some(3 << 30),
                offset: Some(2 << 20),
                owner: Some("b".to_owned()),
                epoch: Some(2),
                problem: None,
            }],
            problem: None,
        };
        let text = show(&pool);
        assert!(text.contains("web") && text.contains("3.00 GiB"), "{text}");
        assert!(text.contains("2.00 MiB"), "{text}");
        assert!(list(&[pool]).contains("1.00 GiB"));
    }
}
