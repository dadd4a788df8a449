//! The OpenAPI document.

use std::collections::BTreeMap;

use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::schema::AdditionalProperties;
use utoipa::openapi::{self, Object, RefOr, Response, ResponseBuilder, Schema};
use utoipa::{Modify, OpenApi};

use super::routes;
use super::routes::{memory, moves, nics, processes, vms};
use super::{Disk, ErrorBody, ErrorCode, Migration, Vm, access};

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
        routes::resize_disk,
        routes::abandon_missing,
        routes::list_jobs,
        routes::show_job,
        moves::list_migrations,
        moves::migrate,
        moves::show_migration,
        moves::cancel_migration,
        moves::switch_migration,
        routes::list_peers,
        vms::list_vms,
        vms::run_vm,
        vms::adopt_vm,
        vms::show_vm,
        vms::stop_vm,
        vms::resume_vm,
        vms::forget_vm,
        vms::move_memory,
        vms::cancel_memory,
        vms::migrate_vm,
        vms::protect_vm,
        vms::unprotect_vm,
        vms::fail_over_vm,
        nics::list_nics,
        nics::create_nic,
        nics::show_named_nic,
        nics::remove_nic,
        nics::show_nic,
        memory::list_memory_pools,
        memory::show_memory_pool,
        memory::format_memory_pool,
        processes::list_processes,
        processes::show_process,
        processes::migrate_process,
        processes::list_containers,
        processes::migrate_container,
    ),
    components(schemas(ErrorBody, Disk, Migration, Vm)),
    modifiers(&Flattened, &Namesakes, &Refusals)
)]
struct Document;

/// Shows flattened options as fields of the request that they stand in.
struct Flattened;

impl Modify for Flattened {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let Some(components) = &mut document.components else {
            return;
        };
        let known = components.schemas.clone();
        for schema in components.schemas.values_mut() {
            let RefOr::T(Schema::AllOf(parts)) = schema else {
                continue;
            };
            let objects = parts.items.iter().map(|part| object(part, &known));
            let Some(objects) = objects.collect::<Option<Vec<_>>>() else {
                continue;
            };
            let mut whole = Object::new();
            whole.description.clone_from(&parts.description);
            for mut object in objects {
                whole.properties.append(&mut object.properties);
                whole.required.append(&mut object.required);
            }
            // Requests alone flatten objects, and take no unknown field.
            whole.additional_properties = Some(Box::new(AdditionalProperties::FreeForm(false)));
            *schema = whole.into();
        }
    }
}

/// Returns a schema of an object, which may be named.
fn object(schema: &RefOr<Schema>, known: &BTreeMap<String, RefOr<Schema>>) -> Option<Object> {
    match schema {
        RefOr::T(Schema::Object(object)) => Some(object.clone()),
        RefOr::T(_) => None,
        RefOr::Ref(named) => {
            let name = named.ref_location.rsplit('/').next()?;
            known.get(name).and_then(|schema| object(schema, known))
        }
    }
}

/// Adds the operations on a disk or VM whose name equals a route's last segment.
struct Namesakes;

impl Modify for Namesakes {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let paths = &mut document.paths.paths;
        for (of, path) in [
            ("/v1/disks/{name}", routes::IMPORT),
            ("/v1/vms/{name}", vms::ADOPT),
        ] {
            let Some(of) = paths.get(of).cloned() else {
                continue;
            };
            let namesake = |operation: Option<Operation>| {
                let mut operation = operation?;
                let id = operation.operation_id.unwrap_or_default();
                let name = path.rsplit('/').next().unwrap_or_default();
                operation.operation_id = Some(format!("{id}_called_{name}"));
                if let Some(parameters) = &mut operation.parameters {
                    parameters.retain(|parameter| parameter.parameter_in != ParameterIn::Path);
                }
                Some(operation)
            };
            if let Some(item) = paths.get_mut(path) {
                item.get = namesake(of.get);
                item.delete = namesake(of.delete);
            }
        }
    }
}

/// Adds the errors that any route can answer.
struct Refusals;

impl Modify for Refusals {
    fn modify(&self, document: &mut openapi::OpenApi) {
        for (path, item) in &mut document.paths.paths {
            let operations = [
                &mut item.get,
                &mut item.post,
                &mut item.delete,
                &mut item.put,
                &mut item.patch,
            ];
            for operation in operations.into_iter().flatten() {
                let takes_something =
                    operation.parameters.is_some() || operation.request_body.is_some();
                let open = access::FOR_EVERYBODY.contains(&path.as_str());
                let refusals = [
                    (
                        takes_something,
                        ErrorCode::Invalid,
                        "The request makes no sense",
                    ),
                    (
                        !open,
                        ErrorCode::Forbidden,
                        "The caller's certificate does not allow it",
                    ),
                    (
                        !open,
                        ErrorCode::Internal,
                        "Something failed inside the node",
                    ),
                    (
                        !open,
                        ErrorCode::ShuttingDown,
                        "The node is shutting down, or at a limit",
                    ),
                ];
                for (_, code, why) in refusals.into_iter().filter(|(can, ..)| *can) {
                    let responses = &mut operation.responses.responses;
                    let status = code.status().to_string();
                    responses
                        .entry(status)
                        .or_insert_with(|| refusal(why).into());
                }
            }
        }
    }
}

fn refusal(why: &str) -> Response {
    let body = openapi::Ref::from_schema_name("ErrorBody");
    let content = openapi::ContentBuilder::new().schema(Some(body)).build();
    ResponseBuilder::new()
        .description(why)
        .content("application/json", content)
        .build()
}

/// Returns the OpenAPI document of the API.
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
    fn options_are_fields_of_the_requests_that_they_stand_in() {
        let document = serde_json::to_value(document()).expect("is JSON");
        for (request, own, option) in [
            ("MigrateRequest", "into", "push_threshold"),
            ("MigrateVm", "memory", "verify"),
            ("MigrateProcess", "pre_setup", "files"),
            ("MigrateContainer", "to", "pre_copy"),
        ] {
            let schema = &document["components"]["schemas"][request];
            for field in [own, option] {
                let has = schema["properties"][field].is_object();
                assert!(has, "{request}: {field}: {schema}");
            }
            let required = schema["required"].as_array().expect("a list");
            assert!(required.contains(&"to".into()), "{request}");
            assert_eq!(schema["additionalProperties"], false, "{request}");
        }
    }

    #[test]
    fn every_method_of_the_router_is_documented() {
        let document = serde_json::to_value(document()).expect("is JSON");
        for (path, methods) in routes::routes() {
            // The method router shows the methods in debug output only.
            let routed = format!("{methods:?}");
            for method in ["get", "post", "put", "delete", "patch"] {
                let has = !routed.contains(&format!("{method}: None"));
                let documented = !document["paths"][path][method].is_null();
                assert_eq!(documented, has, "{method} {path}: {routed}");
            }
        }
    }
}
