//! The command `godwit container`.

use godwit_api::Container;

use crate::arguments::ContainerCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, table};

pub(crate) async fn run(
    command: ContainerCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        ContainerCommand::List => {
            let containers: Vec<Container> = client.get(routes::CONTAINERS).await?;
            output.print(&containers, |containers| list(containers))
        }
    }
}

fn list(containers: &[Container]) -> String {
    let row = |container: &Container| {
        let pid = container.pid.map(|pid| pid.to_string());
        let users = container.rdma_processes.iter().map(u32::to_string);
        [
            container.id.clone(),
            container.status.clone(),
            pid.unwrap_or_default(),
            users.collect::<Vec<_>>().join(", "),
            match (container.pid, container.obstacles.len()) {
                (None, _) => String::from("no, nothing of it runs"),
                (Some(_), 0) => String::from("yes"),
                (Some(_), 1) => format!("no: {}", container.obstacles[0]),
                (Some(_), count) => format!("no, {count} in the way: {}", container.obstacles[0]),
            },
        ]
    };
    table(
        ["CONTAINER", "STATUS", "PID", "WITH RDMA", "CAN MOVE"],
        containers.iter().map(row),
        "runc has no container here",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_shows_what_is_in_its_way() {
        let container = |pid, obstacles: &[&str]| Container {
            id: "job".to_owned(),
            status: "running".to_owned(),
            pid,
            bundle: "/srv/job".to_owned(),
            rdma_processes: vec![17],
            obstacles: obstacles.iter().map(|one| (*one).to_owned()).collect(),
        };
        let told = |pid, obstacles| list(&[container(pid, obstacles)]).trim_end().to_owned();
        let free = told(Some(16), &[]);
        assert!(
            free.contains("job") && free.contains("17") && free.ends_with("yes"),
            "{free}"
        );
        assert!(told(Some(16), &["it has a terminal"]).ends_with("no: it has a terminal"));
        assert!(told(Some(16), &["one", "two"]).ends_with("no, 2 in the way: one"));
        assert!(told(None, &[]).ends_with("nothing of it runs"));
        assert_eq!(list(&[]), "runc has no container here");
    }
}
