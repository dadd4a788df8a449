//! The OpenAPI document.

use utoipa::OpenApi;

use super::{error, routes, types, vm, vm_routes};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Godwit node",
        description = "Serves disks and virtual machines, and moves them between nodes while they are used."
    ),
    paths(
        routes::health,
        routes::show_metrics,
        routes::openapi,
        routes::show_node,
        routes::list_disks,
        routes::create_disk,
        routes::import_disk,
        routes::show_disk,
        routes::remove_disk,
        routes::export_disk,
        routes::claim_disk,
        routes::list_jobs,
        routes::show_job,
        routes::list_migrations,
        routes::migrate,
        routes::show_migration,
        routes::cancel_migration,
        routes::list_peers,
        vm_routes::list_vms,
        vm_routes::run_vm,
        vm_routes::adopt_vm,
        vm_routes::show_vm,
        vm_routes::stop_vm,
        vm_routes::resume_vm,
        vm_routes::forget_vm,
        vm_routes::migrate_vm,
        vm_routes::list_vm_migrations,
        vm_routes::show_vm_migration,
        vm_routes::cancel_vm_migration,
    ),
    components(schemas(error::ErrorBody, types::Disk, types::Migration, vm::Vm))
)]
struct Document;

/// The OpenAPI document of the API.
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_document_and_the_router_have_the_same_paths() {
        let documented: BTreeSet<String> = document().paths.paths.into_keys().collect();
        let routed: BTreeSet<String> = routes::routes()
            .into_iter()
            .map(|(path, _)| path.to_owned())
            .collect();
        assert_eq!(documented, routed);
    }

    #[test]
    fn every_method_of_the_router_is_documented() {
        let document = serde_json::to_value(document()).expect("is JSON");
        for (path, methods) in routes::routes() {
            // The method router's only public trace of its methods.
            let routed = format!("{methods:?}");
            for method in ["get", "post", "put", "delete", "patch"] {
                let has = !routed.contains(&format!("{method}: None"));
                let documented = !document["paths"][path][method].is_null();
                assert_eq!(documented, has, "{method} {path}: {routed}");
            }
        }
    }
}
