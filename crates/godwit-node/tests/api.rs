//! The API as its clients see it, and the state after a restart.

mod support;

use std::os::unix::fs::PermissionsExt;

use serde_json::json;
use support::{RunningNode, plain, says, until};

async fn node(dir: &std::path::Path) -> RunningNode {
    RunningNode::start(plain("a", dir)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_outlives_its_node_and_goes_when_it_is_removed() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = node(dir.path()).await;
    let made = first
        .call(
            "POST /v1/disks",
            r#"{"name":"root","size_bytes":1048576}"#,
            201,
        )
        .await;
    let path = made.json()["path"].as_str().expect("a path").to_owned();
    first.stop().await;

    let second = node(dir.path()).await;
    let disk = second.get("/v1/disks/root").await.json();
    assert_eq!(disk["state"], "serving", "{disk}");
    assert_eq!(disk["serves"], true, "{disk}");
    assert_eq!(disk["epoch"], 1, "{disk}");
    assert_eq!(disk["size_bytes"], 1_048_576, "{disk}");
    second.call("DELETE /v1/disks/root", "", 204).await;
    assert!(!std::path::Path::new(&path).exists());
    second.stop().await;

    let third = node(dir.path()).await;
    assert_eq!(third.get("/v1/disks").await.json(), serde_json::json!([]));
    third.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_gone_is_a_problem_of_that_disk_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = node(dir.path()).await;
    let mut paths = Vec::new();
    for name in ["kept", "lost"] {
        let body = format!(r#"{{"name":"{name}","size_bytes":1048576}}"#);
        let made = first.request("POST", "/v1/disks", &body).await.json();
        paths.push(made["path"].as_str().expect("a path").to_owned());
    }
    first.stop().await;
    std::fs::remove_file(&paths[1]).expect("removes the image");

    let second = node(dir.path()).await;
    assert_eq!(
        second.get("/v1/disks/kept").await.json()["state"],
        "serving"
    );
    let lost = second.get("/v1/disks/lost").await.json();
    assert_eq!(lost["state"], "failed", "{lost}");
    let problem = lost["problem"].as_str().expect("a problem");
    assert!(problem.contains(&paths[1]), "{problem}");
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_becomes_a_disk_and_an_export_equals_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("image");
    let content: Vec<u8> = (0..1_048_576_u32).map(|at| (at / 7) as u8).collect();
    std::fs::write(&image, &content).expect("writes the image");
    let copy = dir.path().join("copy");
    let running = node(dir.path()).await;
    for (path, body) in [
        (
            "/v1/disks/import",
            format!(r#"{{"name":"root","path":"{}"}}"#, image.display()),
        ),
        (
            "/v1/disks/root/export",
            format!(r#"{{"path":"{}"}}"#, copy.display()),
        ),
    ] {
        let job = running.call(&format!("POST {path}"), &body, 202).await;
        let id = job.json()["id"].as_str().expect("an id").to_owned();
        let path = format!("/v1/jobs/{id}");
        let over =
            async || Some(running.get(&path).await.json()).filter(|job| job["state"] != "running");
        let ended = until("the job ends", over).await;
        assert_eq!(ended["state"], "done", "{ended}");
        assert_eq!(ended["bytes_done"], 1_048_576, "{ended}");
    }
    assert!(std::fs::read(&copy).expect("reads the copy") == content);
    assert_eq!(
        running.get("/v1/disks/root").await.json()["state"],
        "serving"
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_may_have_the_name_of_a_route() {
    let dir = tempfile::tempdir().expect("a folder");
    let running = node(dir.path()).await;
    let body = r#"{"name":"import","size_bytes":1048576}"#;
    running.call("POST /v1/disks", body, 201).await;
    let shown = running.call("GET /v1/disks/import", "", 200).await;
    assert_eq!(shown.json()["name"], "import");
    running.call("DELETE /v1/disks/import", "", 204).await;
    assert_eq!(running.get("/v1/disks/import").await.status, 404);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_json_errors() {
    let dir = tempfile::tempdir().expect("a folder");
    let running = node(dir.path()).await;
    let too_long = format!(r#"{{"name":"{}"}}"#, "n".repeat(1 << 17));
    let nothing = "0".repeat(32);
    let cancel = format!("/v1/migrations/{nothing}/cancel");
    for (method, path, body, status, code) in [
        ("GET", "/v1/nothing", "", 404, "not_found"),
        ("PUT", "/v1/disks", "", 405, "invalid"),
        ("GET", "/v1/disks/none", "", 404, "not_found"),
        ("GET", "/v1/disks/%2e%2e%2fetc", "", 404, "not_found"),
        ("DELETE", "/v1/disks/none?force=perhaps", "", 400, "invalid"),
        ("POST", "/v1/disks", "{", 400, "invalid"),
        ("POST", "/v1/disks", "[]", 400, "invalid"),
        (
            "POST",
            "/v1/disks",
            r#"{"name":"a","size":1}"#,
            400,
            "invalid",
        ),
        ("POST", "/v1/disks", r#"{"name":"a"}"#, 400, "invalid"),
        (
            "POST",
            "/v1/disks",
            r#"{"name":"a/b","size_bytes":512}"#,
            400,
            "invalid",
        ),
        (
            "POST",
            "/v1/disks",
            r#"{"name":"a","size_bytes":511}"#,
            400,
            "invalid",
        ),
        (
            "POST",
            "/v1/disks",
            r#"{"name":"a","path":"relative"}"#,
            400,
            "invalid",
        ),
        ("POST", "/v1/disks", &too_long, 400, "invalid"),
        (
            "POST",
            "/v1/migrations",
            r#"{"disk":"none","to":"b"}"#,
            404,
            "not_found",
        ),
        (
            "POST",
            "/v1/migrations",
            r#"{"disk":"none","to":"b","speed":1}"#,
            400,
            "invalid",
        ),
        ("GET", "/v1/migrations/zz", "", 400, "invalid"),
        ("POST", &cancel, "", 404, "not_found"),
        ("GET", "/v1/jobs/1", "", 404, "not_found"),
    ] {
        let answer = running.request(method, path, body).await;
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
        let error = answer.json();
        assert_eq!(error["code"], code, "{method} {path}: {error}");
        assert!(error["message"].is_string(), "{error}");
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_the_document_are_served() {
    let dir = tempfile::tempdir().expect("a folder");
    let running = node(dir.path()).await;
    let body = r#"{"name":"root","size_bytes":1048576}"#;
    running.request("POST", "/v1/disks", body).await;
    let metrics = running.get("/metrics").await.body;
    for line in [
        "godwit_disk_serves{disk=\"root\"} 1.0",
        "godwit_disk_requests_total{disk=\"root\",operation=\"write\"} 0",
        "godwit_disk_compressed_bytes_total{disk=\"root\",operation=\"to\"} 0",
        "godwit_disk_request_seconds_bucket{le=\"+Inf\",disk=\"root\"} 0",
        "godwit_disk_epoch{disk=\"root\"} 1.0",
        "# TYPE godwit_disk_requests_total counter",
        "# TYPE godwit_disk_epoch gauge",
    ] {
        assert!(metrics.contains(line), "{line} is not in:\n{metrics}");
    }
    // The rules of Prometheus' own linter.
    for line in metrics.lines().filter(|line| line.starts_with("# TYPE ")) {
        let counts = line.ends_with(" counter");
        assert_eq!(counts, line.contains("_total "), "{line}");
        let help = line.replace("# TYPE ", "# HELP ").replace(" counter", " ");
        let help = help.replace(" gauge", " ").replace(" histogram", " ");
        assert!(metrics.contains(&help), "{line} has no help");
    }
    let document = running.get("/openapi.json").await.json();
    assert!(
        document["openapi"]
            .as_str()
            .is_some_and(|version| version.starts_with("3."))
    );
    let parameter = |path: &str, method: &str, name: &str| {
        let operation = &document["paths"][path][method];
        let parameters = operation["parameters"].as_array().expect("parameters");
        let parameter = parameters.iter().find(|p| p["name"] == name);
        parameter
            .unwrap_or_else(|| panic!("{name}: {operation}"))
            .clone()
    };
    for (path, method, name) in [
        ("/v1/disks/{name}", "delete", "force"),
        ("/v1/migrations/{id}", "get", "wait_ms"),
    ] {
        let found = parameter(path, method, name);
        assert_eq!(found["in"], "query", "{found}");
        assert_ne!(found["required"], true, "{found}");
    }
    let refusals = &document["paths"]["/v1/disks"]["get"]["responses"];
    for status in ["403", "500", "503"] {
        assert!(refusals[status].is_object(), "{status}: {refusals}");
    }
    let size = &document["components"]["schemas"]["CreateDisk"]["properties"]["size_bytes"];
    assert_eq!(
        (&size["minimum"], &size["multipleOf"]),
        (&json!(512), &json!(512))
    );
    // A disk or machine may have the name of a route.
    let disk = r#"{"name":"import","size_bytes":4096}"#;
    assert_eq!(running.request("POST", "/v1/disks", disk).await.status, 201);
    assert_eq!(running.get("/v1/disks/import").await.status, 200);
    assert_eq!(running.get("/v1/vms/adopt").await.status, 404);
    assert_eq!(running.get("/health").await.status, 200);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_data_directory_is_one_nodes_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let running = node(dir.path()).await;
    let second = godwit_node::run(plain("a", dir.path()), std::future::pending()).await;
    let error = second.expect_err("the directory is taken").to_string();
    says(&error, "another node");
    let mode = |path| {
        let metadata = std::fs::metadata(path).expect("is there");
        metadata.permissions().mode() & 0o777
    };
    assert_eq!(mode(running.config.data_dir.clone()), 0o700);
    assert_eq!(mode(running.config.api_socket()), 0o600);
    assert_eq!(mode(running.config.nbd_socket()), 0o600);
    running.stop().await;
}
