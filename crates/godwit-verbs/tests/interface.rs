//! The whole interface of libibverbs for programs, and this library's treatment of each call.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use Treatment::{Apart, Asks, Devices, Moves, Stays};
use godwit_verbs::abi::ExtendedVerbs;

/// The treatment of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Treatment {
    /// The call works on objects of this library, and its effects are made again after a move.
    Moves,
    /// The call is passed on with the device's objects and leaves no effect that a move would have to repeat.
    Asks,
    /// The call is passed on with the device's objects, and its effects keep the process from moving.
    Stays,
    /// The call takes no object for which this library has a shadow.
    Apart,
    /// Libraries of devices make the call, with objects of their own.
    Devices,
}

impl Treatment {
    /// Returns true if this library must have a function of the same name.
    fn is_ours(self) -> bool {
        matches!(self, Moves | Asks | Stays)
    }
}

/// The symbols of libibverbs, of all versions.
const SYMBOLS: &[(Treatment, &[&str])] = &[
    (
        Moves,
        &[
            "ibv_open_device",
            "ibv_close_device",
            "ibv_alloc_pd",
            "ibv_dealloc_pd",
            "ibv_reg_mr",
            "ibv_reg_mr_iova",
            "ibv_reg_mr_iova2",
            "ibv_dereg_mr",
            "ibv_create_comp_channel",
            "ibv_destroy_comp_channel",
            "ibv_create_cq",
            "ibv_resize_cq",
            "ibv_destroy_cq",
            "ibv_get_cq_event",
            "ibv_ack_cq_events",
            "ibv_create_srq",
            "ibv_modify_srq",
            "ibv_query_srq",
            "ibv_destroy_srq",
            "ibv_create_qp",
            "ibv_qp_to_qp_ex",
            "ibv_query_qp",
            "ibv_modify_qp",
            "ibv_destroy_qp",
            "ibv_create_ah",
            "ibv_create_ah_from_wc",
            "ibv_destroy_ah",
            "ibv_get_async_event",
            "ibv_ack_async_event",
        ],
    ),
    (
        Asks,
        &[
            "ibv_query_device",
            "ibv_query_port",
            "ibv_query_gid",
            "ibv_query_pkey",
            "ibv_get_pkey_index",
            "_ibv_query_gid_ex",
            "_ibv_query_gid_table",
            "ibv_init_ah_from_wc",
            "ibv_query_ece",
            "ibv_query_qp_data_in_order",
            "ibv_resolve_eth_l2_from_gid",
            "ibv_query_gid_type",
            "ibv_detach_mcast",
        ],
    ),
    (
        Stays,
        &[
            "ibv_rereg_mr",
            "ibv_reg_dmabuf_mr",
            "ibv_attach_mcast",
            "ibv_set_ece",
            "ibv_import_device",
            "ibv_import_pd",
            "ibv_import_mr",
            "ibv_import_dm",
            "ibv_unimport_pd",
            "ibv_unimport_mr",
            "verbs_open_device",
        ],
    ),
    (
        Apart,
        &[
            "ibv_get_device_list",
            "ibv_free_device_list",
            "ibv_get_device_name",
            "ibv_get_device_guid",
            "ibv_get_device_index",
            "ibv_fork_init",
            "ibv_is_fork_initialized",
            "ibv_dofork_range",
            "ibv_dontfork_range",
            "ibv_event_type_str",
            "ibv_node_type_str",
            "ibv_port_state_str",
            "ibv_wc_status_str",
            "ibv_rate_to_mbps",
            "ibv_rate_to_mult",
            "mbps_to_ibv_rate",
            "mult_to_ibv_rate",
            "ibv_copy_ah_attr_from_kern",
            "ibv_copy_path_rec_from_kern",
            "ibv_copy_path_rec_to_kern",
            "ibv_copy_qp_attr_from_kern",
            "ibv_get_sysfs_path",
            "ibv_read_sysfs_file",
            "ibv_read_ibdev_sysfs_file",
            "ibv_unimport_dm",
        ],
    ),
    (
        Devices,
        &[
            "__ioctl_final_num_attrs",
            "__verbs_log",
            "_verbs_init_and_alloc_context",
            "execute_ioctl",
            "ibv_cmd_advise_mr",
            "ibv_cmd_alloc_dm",
            "ibv_cmd_alloc_mw",
            "ibv_cmd_alloc_pd",
            "ibv_cmd_attach_mcast",
            "ibv_cmd_close_xrcd",
            "ibv_cmd_create_ah",
            "ibv_cmd_create_counters",
            "ibv_cmd_create_cq",
            "ibv_cmd_create_cq_ex",
            "ibv_cmd_create_flow",
            "ibv_cmd_create_flow_action_esp",
            "ibv_cmd_create_qp",
            "ibv_cmd_create_qp_ex",
            "ibv_cmd_create_qp_ex2",
            "ibv_cmd_create_rwq_ind_table",
            "ibv_cmd_create_srq",
            "ibv_cmd_create_srq_ex",
            "ibv_cmd_create_wq",
            "ibv_cmd_dealloc_mw",
            "ibv_cmd_dealloc_pd",
            "ibv_cmd_dereg_mr",
            "ibv_cmd_destroy_ah",
            "ibv_cmd_destroy_counters",
            "ibv_cmd_destroy_cq",
            "ibv_cmd_destroy_flow",
            "ibv_cmd_destroy_flow_action",
            "ibv_cmd_destroy_qp",
            "ibv_cmd_destroy_rwq_ind_table",
            "ibv_cmd_destroy_srq",
            "ibv_cmd_destroy_wq",
            "ibv_cmd_detach_mcast",
            "ibv_cmd_free_dm",
            "ibv_cmd_get_context",
            "ibv_cmd_modify_cq",
            "ibv_cmd_modify_flow_action_esp",
            "ibv_cmd_modify_qp",
            "ibv_cmd_modify_qp_ex",
            "ibv_cmd_modify_srq",
            "ibv_cmd_modify_wq",
            "ibv_cmd_open_qp",
            "ibv_cmd_open_xrcd",
            "ibv_cmd_poll_cq",
            "ibv_cmd_post_recv",
            "ibv_cmd_post_send",
            "ibv_cmd_post_srq_recv",
            "ibv_cmd_query_context",
            "ibv_cmd_query_device_any",
            "ibv_cmd_query_mr",
            "ibv_cmd_query_port",
            "ibv_cmd_query_qp",
            "ibv_cmd_query_srq",
            "ibv_cmd_read_counters",
            "ibv_cmd_reg_dm_mr",
            "ibv_cmd_reg_dmabuf_mr",
            "ibv_cmd_reg_mr",
            "ibv_cmd_req_notify_cq",
            "ibv_cmd_rereg_mr",
            "ibv_cmd_resize_cq",
            "ibv_register_driver",
            "verbs_allow_disassociate_destroy",
            "verbs_init_cq",
            "verbs_register_driver_34",
            "verbs_set_ops",
            "verbs_uninit_context",
        ],
    ),
];

/// The verbs in contexts. Programs reach the verbs that are `Apart` only through objects of the device.
const VERBS: &[(&str, Treatment)] = &[
    ("query_port", Asks),
    ("advise_mr", Asks),
    ("alloc_null_mr", Stays),
    ("read_counters", Apart),
    ("attach_counters_point_flow", Apart),
    ("create_counters", Stays),
    ("destroy_counters", Apart),
    ("reg_dm_mr", Stays),
    ("alloc_dm", Stays),
    ("free_dm", Apart),
    ("modify_flow_action_esp", Apart),
    ("destroy_flow_action", Apart),
    ("create_flow_action_esp", Stays),
    ("modify_qp_rate_limit", Stays),
    ("alloc_parent_domain", Stays),
    ("dealloc_td", Apart),
    ("alloc_td", Stays),
    ("modify_cq", Stays),
    ("post_srq_ops", Asks),
    ("destroy_rwq_ind_table", Apart),
    ("create_rwq_ind_table", Stays),
    ("destroy_wq", Apart),
    ("modify_wq", Apart),
    ("create_wq", Stays),
    ("query_rt_values", Asks),
    ("create_cq_ex", Moves),
    ("private", Devices),
    ("query_device_ex", Asks),
    ("destroy_flow", Apart),
    ("abi_placeholder2", Devices),
    ("create_flow", Stays),
    ("abi_placeholder1", Devices),
    ("open_qp", Stays),
    ("create_qp_ex", Moves),
    ("get_srq_num", Asks),
    ("create_srq_ex", Stays),
    ("open_xrcd", Stays),
    ("close_xrcd", Apart),
];

fn symbols() -> BTreeMap<&'static str, Treatment> {
    let mut all = BTreeMap::new();
    for (treatment, names) in SYMBOLS {
        for name in *names {
            assert!(all.insert(*name, *treatment).is_none(), "{name} twice");
        }
    }
    all
}

/// Returns the functions of a library, of any version.
fn offered(library: &Path) -> BTreeSet<String> {
    let file = std::fs::read(library).unwrap();
    let number = |place: usize, size: usize| {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&file[place..place + size]);
        u64::from_le_bytes(bytes) as usize
    };
    // `Elf64_Ehdr`, `Elf64_Shdr`, `Elf64_Sym`
    let (first, size, count) = (number(40, 8), number(58, 2), number(60, 2));
    let section = |place: usize| first + place * size;
    let symbols = (0..count)
        .map(section)
        .find(|header| number(header + 4, 4) == 11)
        .expect("a table of dynamic symbols");
    let names = number(section(number(symbols + 40, 4)) + 24, 8);
    let (begin, length) = (number(symbols + 24, 8), number(symbols + 32, 8));
    let mut found = BTreeSet::new();
    for symbol in (begin..begin + length).step_by(24) {
        // Functions (`STT_FUNC`) that the library defines.
        if file[symbol + 4] & 0xf == 2 && number(symbol + 6, 2) != 0 {
            let name = &file[names + number(symbol, 4)..];
            let end = name.iter().position(|byte| *byte == 0).unwrap();
            found.insert(String::from_utf8_lossy(&name[..end]).into_owned());
        }
    }
    found
}

/// Returns this host's libibverbs, if installed.
fn installed() -> Option<PathBuf> {
    // SAFETY: a constant name; libibverbs' constructors are those that applications run.
    let loaded = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
    if loaded.is_null() {
        return None;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut files = maps
        .lines()
        .filter_map(|line| Some(&line[line.find('/')?..]));
    files
        .find(|file| file.contains("/libibverbs.so"))
        .map(PathBuf::from)
}

#[test]
fn each_symbol_of_libibverbs_has_its_treatment() {
    let Some(library) = installed() else {
        return;
    };
    let treated = symbols();
    let unknown: Vec<_> = offered(&library)
        .into_iter()
        .filter(|name| !treated.contains_key(name.as_str()))
        .collect();
    assert_eq!(unknown, [""; 0], "{}", library.display());
}

#[test]
fn this_library_has_a_function_where_objects_are_named() {
    let program = std::env::current_exe().unwrap();
    let ours = offered(&program.with_file_name("libgodwit_verbs.so"));
    for (name, treatment) in symbols() {
        assert_eq!(ours.contains(name), treatment.is_ours(), "{name}");
    }
}

#[test]
fn each_extended_verb_has_its_treatment() {
    let named: Vec<_> = VERBS.iter().map(|(name, _)| *name).collect();
    assert_eq!(named, ExtendedVerbs::NAMES);
}
