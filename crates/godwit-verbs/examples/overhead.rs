//! The library's cost on the data path: posting and polling with and without the library, in turns, on a provider that
//! does nothing (`null_provider`). Writes target/bench-verbs/overhead.json.
//!
//! Cycles are ticks of the time-stamp counter. A sample is the mean of one turn's calls. The result is the median of
//! all samples, which discards the effect of other programs on the machine.

#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::{__rdtscp, _mm_lfence, _rdtsc};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use serde::Serialize;

#[path = "../src/abi/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub)]
mod abi;
use abi::*;

/// Calls in a turn.
const CALLS: u64 = 512;
/// Turns of each side.
const TURNS: usize = 20_000;
/// Bytes of a message, as in the paper's Table 4.
const MESSAGE: u32 = 64;

#[derive(Serialize)]
struct Report {
    calls_in_a_turn: u64,
    turns: usize,
    message_bytes: u32,
    verbs: Vec<Verb>,
}

/// Median cycles of one call.
#[derive(Serialize)]
struct Verb {
    verb: &'static str,
    /// Without the library, and with the library.
    without: f64,
    with: f64,
    extra: f64,
    /// With the library in a process that has moved, so that keys are translated.
    with_after_move: f64,
    extra_after_move: f64,
    /// From the RDMA live-migration paper's Table 4.
    paper_extra: Option<f64>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("overhead: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Set in a process that finds the provider under libibverbs' name.
const STARTED: &str = "GODWIT_BENCH_VERBS";

fn run() -> io::Result<()> {
    let here = std::env::current_exe()?;
    let examples = here.parent().unwrap_or(Path::new("."));
    let profile = examples.parent().unwrap_or(Path::new("."));
    let into = profile.with_file_name("bench-verbs");
    if std::env::var_os(STARTED).is_none() {
        std::fs::create_dir_all(&into)?;
        std::fs::copy(
            examples.join("libnull_provider.so"),
            into.join("libibverbs.so.1"),
        )?;
        // The dynamic linker reads the path when a program starts.
        return Err(Command::new(&here)
            .env("LD_LIBRARY_PATH", &into)
            .env(STARTED, "1")
            .exec());
    }
    // SAFETY: both libraries export the functions of verbs.h with the types in `abi`.
    let verbs = unsafe {
        let without = Side::open(Path::new("libibverbs.so.1"))?;
        let with = Side::open(&profile.join("libgodwit_verbs.so"))?;
        let before = ACTS.map(|(_, _, act)| compare(act, &without, &with));
        move_here(&with)?;
        let after = ACTS.map(|(_, _, act)| compare(act, &without, &with));
        let mut verbs = Vec::new();
        for (place, (verb, paper_extra, _)) in ACTS.into_iter().enumerate() {
            let ([without, with], [without_again, with_after_move]) = (before[place], after[place]);
            verbs.push(Verb {
                verb,
                without,
                with,
                extra: with - without,
                with_after_move,
                extra_after_move: with_after_move - without_again,
                paper_extra,
            });
        }
        verbs
    };
    let report = Report {
        calls_in_a_turn: CALLS,
        turns: TURNS,
        message_bytes: MESSAGE,
        verbs,
    };
    println!("verb   without   with  extra  after a move  extra  paper's extra   (cycles, median)");
    for verb in &report.verbs {
        let paper = verb
            .paper_extra
            .map_or("-".to_owned(), |cycles| format!("{cycles:.1}"));
        println!(
            "{:5} {:8.1} {:6.1} {:6.1} {:13.1} {:6.1} {paper:>14}",
            verb.verb,
            verb.without,
            verb.with,
            verb.extra,
            verb.with_after_move,
            verb.extra_after_move
        );
    }
    let path: PathBuf = into.join("overhead.json");
    std::fs::write(&path, serde_json::to_string_pretty(&report)?)?;
    println!("report: {}", path.display());
    Ok(())
}

/// A queue pair, with the library or without.
struct Side {
    pair: *mut ibv_qp,
    queue: *mut ibv_cq,
    region: *mut ibv_mr,
    /// The opcode of the provider's completions.
    opcode: &'static AtomicI32,
}

impl Side {
    /// Opens the device of the library at `path`.
    unsafe fn open(path: &Path) -> io::Result<Self> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())?;
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() {
            let why = std::ffi::CStr::from_ptr(libc::dlerror()).to_string_lossy();
            return Err(io::Error::other(format!(
                "{why}; run make bench SCENE=verbs"
            )));
        }
        // The list is always the provider's: the library in front has no list.
        let provider = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
        let list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device =
            std::mem::transmute(find(provider, "ibv_get_device_list")?);
        let open: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context =
            std::mem::transmute(find(handle, "ibv_open_device")?);
        let alloc: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd =
            std::mem::transmute(find(handle, "ibv_alloc_pd")?);
        let register: unsafe extern "C" fn(
            *mut ibv_pd,
            *mut c_void,
            usize,
            u64,
            c_uint,
        ) -> *mut ibv_mr = std::mem::transmute(find(handle, "ibv_reg_mr_iova2")?);
        let create_cq: unsafe extern "C" fn(
            *mut ibv_context,
            c_int,
            *mut c_void,
            *mut ibv_comp_channel,
            c_int,
        ) -> *mut ibv_cq = std::mem::transmute(find(handle, "ibv_create_cq")?);
        let create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp =
            std::mem::transmute(find(handle, "ibv_create_qp")?);
        let modify: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int =
            std::mem::transmute(find(handle, "ibv_modify_qp")?);

        let context = open(*list(ptr::null_mut()));
        let pd = alloc(context);
        let buffer = Box::leak(Box::new([0u8; MESSAGE as usize]));
        let address = buffer.as_mut_ptr();
        let region = register(pd, address.cast(), buffer.len(), address as u64, 0);
        let queue = create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        (init.send_cq, init.recv_cq, init.qp_type) = (queue, queue, IBV_QPT_RC);
        init.cap.max_send_wr = 64;
        // The library has places for the next power of two above this, and a turn fills all of them.
        init.cap.max_recv_wr = CALLS as u32 - 1;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        let pair = create_qp(pd, &raw mut init);
        // No later state: behind the requests of a queue pair that may send, the library puts a marker and waits for
        // the marker's completion.
        for state in [IBV_QPS_INIT, IBV_QPS_RTR] {
            let mut to = ibv_qp_attr {
                qp_state: state,
                ..Default::default()
            };
            modify(pair, &raw mut to, IBV_QP_STATE);
        }
        Ok(Self {
            pair,
            queue,
            region,
            opcode: &*find(provider, "null_provider_opcode")?.cast(),
        })
    }
}

unsafe fn find(handle: *mut c_void, name: &str) -> io::Result<*mut c_void> {
    let found = libc::dlsym(handle, CString::new(name)?.as_ptr());
    if found.is_null() {
        return Err(io::Error::other(format!("a library has no {name}")));
    }
    Ok(found)
}

#[derive(Clone, Copy)]
enum Act {
    Send(c_int),
    Receive,
    Poll,
}

/// The measured calls, with the paper's figures.
const ACTS: [(&str, Option<f64>, Act); 5] = [
    ("send", Some(4.6), Act::Send(IBV_WR_SEND)),
    ("recv", Some(5.3), Act::Receive),
    ("write", Some(8.3), Act::Send(IBV_WR_RDMA_WRITE)),
    ("read", Some(6.5), Act::Send(IBV_WR_RDMA_READ)),
    ("poll", None, Act::Poll),
];

/// Takes the library through a move back to this host.
unsafe fn move_here(side: &Side) -> io::Result<()> {
    let provider = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
    let completions = &*find(provider, "null_provider_completions")?.cast::<AtomicI32>();
    completions.store(0, Ordering::Relaxed);
    let number = (*side.pair).qp_num;
    // Without peers, the library is told not to wait for further requests of a peer.
    let received = TURNS as u64 * CALLS;
    for request in [
        r#"{"do":"suspend","only":null}"#.to_owned(),
        format!(r#"{{"do":"drain","peer_sent":[[{number},{received}]],"bound_ms":1000}}"#),
        r#"{"do":"release"}"#.to_owned(),
        r#"{"do":"recreate","device":null}"#.to_owned(),
        format!(
            r#"{{"do":"connect","connections":[{{"number":{number},"remote":"::1","remote_physical":1,"remote_keys":[[1,2]]}}]}}"#
        ),
        r#"{"do":"resume","only":null}"#.to_owned(),
    ] {
        ask(&request)?;
    }
    completions.store(1, Ordering::Relaxed);
    Ok(())
}

/// Completes the receives of a turn: no queue takes receives without end.
unsafe fn complete_receives(side: &Side) {
    side.opcode.store(IBV_WC_RECV, Ordering::Relaxed);
    let poll = (*(*side.queue).context).ops.poll_cq.unwrap_unchecked();
    let mut completion = ibv_wc::default();
    for _ in 0..CALLS {
        assert_eq!(poll(side.queue, 1, &raw mut completion), 1);
    }
    side.opcode.store(0, Ordering::Relaxed);
}

fn ask(request: &str) -> io::Result<()> {
    let name = format!("godwit-verbs-{}", std::process::id());
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    writeln!(stream, "{request}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.contains("error") {
        return Err(io::Error::other(format!("{request}: {answer}")));
    }
    Ok(())
}

/// Returns the median cycles of a call without the library and with it.
unsafe fn compare(act: Act, without: &Side, with: &Side) -> [f64; 2] {
    let mut samples = [Vec::with_capacity(TURNS), Vec::with_capacity(TURNS)];
    for turn in 0..TURNS {
        let mut order = [(0, without), (1, with)];
        if turn % 2 == 1 {
            order.reverse();
        }
        for (place, side) in order {
            samples[place].push(turn_of(act, side));
        }
    }
    samples.map(|mut samples| {
        samples.sort_unstable();
        samples[samples.len() / 2] as f64 / CALLS as f64
    })
}

/// Returns the cycles of one turn. The calls are the same as in the inline functions of verbs.h.
unsafe fn turn_of(act: Act, side: &Side) -> u64 {
    let mut piece = ibv_sge {
        addr: (*side.region).addr as u64,
        length: MESSAGE,
        lkey: (*side.region).lkey,
    };
    let pair = side.pair;
    match act {
        Act::Send(opcode) => {
            let mut request: ibv_send_wr = std::mem::zeroed();
            request.sg_list = &raw mut piece;
            request.num_sge = 1;
            request.opcode = opcode;
            request.send_flags = IBV_SEND_SIGNALED;
            request.wr.rdma = ibv_rdma {
                remote_addr: piece.addr,
                rkey: (*side.region).rkey,
            };
            let mut bad = ptr::null_mut();
            cycles(|call| {
                request.wr_id = call;
                let post = (*(*pair).context).ops.post_send.unwrap_unchecked();
                post(pair, &raw mut request, &raw mut bad)
            })
        }
        Act::Receive => {
            let mut request = ibv_recv_wr {
                wr_id: 0,
                next: ptr::null_mut(),
                sg_list: &raw mut piece,
                num_sge: 1,
            };
            let mut bad = ptr::null_mut();
            let taken = cycles(|call| {
                request.wr_id = call;
                let post = (*(*pair).context).ops.post_recv.unwrap_unchecked();
                post(pair, &raw mut request, &raw mut bad)
            });
            complete_receives(side);
            taken
        }
        Act::Poll => {
            let mut completion = ibv_wc::default();
            cycles(|_| {
                let poll = (*(*side.queue).context).ops.poll_cq.unwrap_unchecked();
                poll(side.queue, 1, &raw mut completion) - 1
            })
        }
    }
}

/// Returns the cycles of all calls of a turn. Each call must return 0.
#[inline(always)]
unsafe fn cycles(mut call: impl FnMut(u64) -> c_int) -> u64 {
    let mut refused = 0;
    _mm_lfence();
    let began = _rdtsc();
    _mm_lfence();
    for number in 0..CALLS {
        refused |= std::hint::black_box(&mut call)(number);
    }
    let mut core = 0;
    let ended = __rdtscp(&raw mut core);
    _mm_lfence();
    assert_eq!(refused, 0, "a request was refused");
    ended - began
}
