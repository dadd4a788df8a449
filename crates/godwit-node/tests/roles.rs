//! The permissions of each role in the API over TLS, route by route.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use godwit_node::Role;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use rustls::pki_types::ServerName;
use support::{Answer, RunningNode, authority, free_address, request, secure, shows};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The role needed for each route. A new route must be added here, too.
const ROUTES: [(&str, &[&str]); 3] = [
    ("everybody", &["get /health", "get /openapi.json"]),
    (
        "reader",
        &[
            "get /metrics",
            "get /v1/containers",
            "get /v1/disks",
            "get /v1/disks/import",
            "get /v1/disks/{name}",
            "get /v1/jobs",
            "get /v1/jobs/{id}",
            "get /v1/migrations",
            "get /v1/migrations/{id}",
            "get /v1/node",
            "get /v1/peers",
            "get /v1/processes",
            "get /v1/processes/{pid}",
            "get /v1/memory-pools",
            "get /v1/memory-pools/{name}",
            "get /v1/nics",
            "get /v1/nics/{name}",
            "get /v1/nics/{vm}/{number}",
            "get /v1/vms",
            "get /v1/vms/adopt",
            "get /v1/vms/{name}",
        ],
    ),
    (
        "operator",
        &[
            "delete /v1/disks/import",
            "delete /v1/disks/{name}",
            "delete /v1/nics/{name}",
            "delete /v1/vms/adopt",
            "delete /v1/vms/{name}",
            "delete /v1/vms/{name}/protection",
            "post /v1/containers/{id}/migrate",
            "post /v1/disks",
            "post /v1/disks/import",
            "post /v1/disks/{name}/abandon",
            "post /v1/disks/{name}/claim",
            "post /v1/disks/{name}/export",
            "post /v1/disks/{name}/resize",
            "post /v1/memory-pools/{name}/format",
            "post /v1/migrations",
            "post /v1/nics",
            "post /v1/migrations/{id}/cancel",
            "post /v1/migrations/{id}/switch",
            "post /v1/processes/{pid}/migrate",
            "post /v1/vms/{name}/failover",
            "post /v1/vms/{name}/memory",
            "post /v1/vms/{name}/memory/cancel",
            "post /v1/vms",
            "post /v1/vms/adopt",
            "post /v1/vms/{name}/migrate",
            "post /v1/vms/{name}/protection",
            "post /v1/vms/{name}/resume",
            "post /v1/vms/{name}/stop",
        ],
    ),
];

/// Issues a certificate without a role, as an authority other than the node's own tool does.
fn issue_without_role(authority: &Path, name: &str, serves: bool) {
    let read = |file: &str| fs::read_to_string(authority.join(file)).expect("reads");
    let key = KeyPair::from_pem(&read("ca.key")).expect("a key");
    let issuer = Issuer::from_ca_cert_pem(&read("ca.pem"), key).expect("an authority");
    let mut parameters = CertificateParams::new([name.to_owned()]).expect("a name");
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if serves {
        let also = ExtendedKeyUsagePurpose::ServerAuth;
        parameters.extended_key_usages.push(also);
    }
    let key = KeyPair::generate().expect("a key");
    let signed = parameters.signed_by(&key, &issuer).expect("signs");
    let write = |end: &str, pem: String| {
        fs::write(authority.join(format!("{name}.{end}")), pem).expect("writes");
    };
    write("pem", signed.pem());
    write("key", key.serialize_pem());
}

async fn call(address: SocketAddr, authority: &Path, who: &str, route: &str) -> Answer {
    let (method, path) = route.split_once(' ').expect("a method and a path");
    let path = path.replace("{name}", "none").replace("{id}", "none");
    let socket = TcpStream::connect(address).await.expect("it listens");
    let name = ServerName::try_from("a").expect("a name");
    let connector = TlsConnector::from(shows(authority, who));
    let socket = connector.connect(name, socket).await.expect("a session");
    request(socket, &method.to_uppercase(), &path, "{}").await
}

/// Returns all routes of the OpenAPI document, in the form of [`ROUTES`].
async fn documented(node: &RunningNode) -> Vec<String> {
    let document = node.get("/openapi.json").await.json();
    let paths = document["paths"].as_object().expect("paths");
    let routes = paths.iter().flat_map(|(path, methods)| {
        let methods = methods.as_object().expect("methods").keys();
        methods.map(move |method| format!("{method} {path}"))
    });
    routes.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_of_the_api_is_open_to_those_roles_alone_that_it_is_meant_for() {
    let dir = tempfile::tempdir().expect("a folder");
    let nodes = [("a", Role::Node), ("node", Role::Node)];
    let people = [("operator", Role::Operator), ("reader", Role::Reader)];
    let roles = [&nodes[..], &people, &[("guest", Role::NbdClient)]].concat();
    let ours = authority(dir.path(), &roles);
    for (from, to) in [
        ("client-cert.pem", "guest.pem"),
        ("client-key.pem", "guest.key"),
    ] {
        fs::copy(ours.join("guest").join(from), ours.join(to)).expect("copies");
    }
    issue_without_role(&ours, "old-server", true);
    issue_without_role(&ours, "old-client", false);
    let mut config = secure("a", dir.path(), &ours, "a");
    let address = free_address();
    config.api_listen = Some(address);
    let a = RunningNode::start(config).await;

    let mut needs = BTreeMap::new();
    for (role, routes) in ROUTES {
        needs.extend(routes.iter().map(|route| (String::from(*route), role)));
    }
    let documented = documented(&a).await;
    let listed: Vec<_> = needs.keys().cloned().collect();
    let mut sorted = documented.clone();
    sorted.sort();
    assert_eq!(sorted, listed, "say in ROUTES who may call a new route");

    for (who, may) in [
        ("operator", &["everybody", "reader", "operator"][..]),
        ("reader", &["everybody", "reader"]),
        ("node", &["everybody"]),
        ("guest", &["everybody"]),
        ("old-server", &["everybody", "reader", "operator"]),
        ("old-client", &["everybody"]),
    ] {
        for (route, need) in &needs {
            let answer = call(address, &ours, who, route).await;
            let body = &answer.body;
            assert_eq!(
                answer.status != 403,
                may.contains(need),
                "{who} {route}: {body}"
            );
            if answer.status == 403 {
                let error = answer.json();
                assert_eq!(error["code"], "forbidden", "{who} {route}: {body}");
                assert!(
                    body.contains(&format!("--role {need}")),
                    "{who} {route}: {body}"
                );
            }
        }
        // A reader who asks for an unknown route gets 404. Roles without read permission get 403.
        let stray = call(address, &ours, who, "get /v1/none").await;
        assert_eq!(stray.status != 403, may.contains(&"reader"), "{who}");
    }
    a.stop().await;
}
