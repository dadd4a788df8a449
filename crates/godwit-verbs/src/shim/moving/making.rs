//! Making the device's objects again.

use super::connecting::{post_again, restart};
use super::windows::bind_again;
use super::{Recreated, describe};
use crate::abi::*;
use crate::shim::descriptors;
use crate::shim::objects::{self, *};
use crate::shim::presetup::{Answer, HandedOver, Planned, as_told, repeat};
use crate::shim::real::real;
use crate::shim::verbs::completions::{lead, make_cq, state};
use crate::shim::verbs::contexts::register;
use crate::shim::verbs::datagrams;
use crate::shim::verbs::queue_pairs::{add_route, make_pair};
use crate::shim::verbs::shared_receives::make_srq;
use crate::shim::verbs::windows::make_window;
use crate::shim::world::{KEYS, Object, Phase, World, windows, world};
use crate::tables::{Call, ObjectId, RemoteKey, Window};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering;

/// Makes the device's objects again, on the device named `device` or on the device of the same name as before.
///
/// # Errors
/// One sentence that names the call that the device refused.
pub fn recreate(device: Option<&str>) -> Result<Recreated, String> {
    let mut world = world();
    let source = Source {
        device,
        ..Source::default()
    };
    make_all(&mut world, source)?;
    // The objects can be given back once more, or used.
    world.phase = Phase::Suspended;
    Ok(Recreated {
        remote_keys: world.remote_keys(),
        // SAFETY: objects live while the world is locked.
        queue_pairs: unsafe { world.queue_pairs().map(|pair| describe(&*pair)).collect() },
    })
}

/// The result of an attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attached {
    /// The process's remote keys: the application's and the device's.
    pub remote_keys: Vec<RemoteKey>,
}

/// Takes over the objects that a holder has made ahead of this process. The queue pairs are connected, and receives
/// that wait for data are posted again. After an error, [`recreate`] makes the missing objects, and queue pairs must be
/// connected.
///
/// # Errors
/// One sentence, if the process has changed since its plan was requested, or the device refused a call.
pub fn attach(handed: HandedOver) -> Result<Attached, String> {
    let mut world = world();
    let Some(planned) = as_told(&world, handed.plan) else {
        return Err(
            "this process has changed since it said what to make ahead of it; its objects have to be made again"
                .to_owned(),
        );
    };
    let source = Source::of(planned, handed)?;
    make_all(&mut world, source)?;
    // SAFETY: objects live while the world is locked.
    for pair in unsafe { world.queue_pairs().map(|pair| &*pair) } {
        let mut lane = pair.lane.visit();
        // SAFETY: the device's queue pair was made just now; receives come before the peer goes on.
        unsafe {
            let state = &(*lane.real).state;
            state.store(pair.face.state.load(Ordering::Relaxed), Ordering::Relaxed);
            post_again(pair, &mut lane)
                .map_err(|error| format!("queue pair {}: {error}", pair.face.qp_num))?;
        }
        pair.failed.store(false, Ordering::Release);
        pair.marker_done.store(true, Ordering::Release);
    }
    // SAFETY: as above; the device's queue pairs are connected.
    unsafe {
        let pairs: Vec<_> = world.queue_pairs().map(|pair| &*pair).collect();
        bind_again(&world, &pairs)?;
    }
    world.phase = Phase::Suspended;
    Ok(Attached {
        remote_keys: world.remote_keys(),
    })
}

/// The origin of new objects.
#[derive(Default)]
struct Source<'a> {
    /// The device's name, if different.
    device: Option<&'a str>,
    /// The kernel's answers from making the objects ahead.
    answers: BTreeMap<ObjectId, Vec<Answer>>,
    /// The two files of each context that was opened ahead.
    files: BTreeMap<ObjectId, [OwnedFd; 2]>,
    /// Files of channels, until a channel owns them.
    channels: BTreeMap<ObjectId, OwnedFd>,
}

impl Source<'_> {
    fn of(objects: &[Planned], handed: HandedOver) -> Result<Self, String> {
        let mut source = Self::default();
        let mut files = handed.descriptors.into_iter();
        let mut next = || {
            files
                .next()
                .ok_or("the holder gave too few files".to_owned())
        };
        for planned in objects {
            if matches!(planned.call, Call::Context) {
                source.files.insert(planned.id, [next()?, next()?]);
            }
        }
        for planned in objects {
            if matches!(planned.call, Call::CompletionChannel { .. }) {
                source.channels.insert(planned.id, next()?);
            }
        }
        source.answers = handed.answers.into_iter().collect();
        for (id, file) in &source.channels {
            let answers = source.answers.get_mut(id);
            for answer in answers.into_iter().flatten() {
                answer.set_descriptor(file.as_raw_fd());
            }
        }
        Ok(source)
    }

    /// Makes the object `id` with `act`, from the kept answers if the object was made ahead.
    fn make<T>(&self, id: ObjectId, act: impl FnOnce() -> *mut T) -> Result<*mut T, String> {
        match self.answers.get(&id) {
            Some(answers) => repeat(answers, act),
            None => Ok(act()),
        }
    }

    /// Returns `made` if the object was made ahead of this process, or null.
    fn ahead<T>(&self, made: *mut T) -> *mut T {
        if self.files.is_empty() {
            ptr::null_mut()
        } else {
            made
        }
    }

    /// Replaces the files of `opened` by the files that were opened ahead.
    unsafe fn replace_files(&self, id: ObjectId, opened: *mut ibv_context) -> io::Result<()> {
        let Some(files) = self.files.get(&id) else {
            return Ok(());
        };
        let places: [c_int; 2] = [(*opened).cmd_fd, (*opened).async_fd];
        for (file, place) in files.iter().zip(places) {
            if libc::dup3(file.as_raw_fd(), place, libc::O_CLOEXEC) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

/// Makes the missing objects. The caller sets the phase on success.
fn make_all(world: &mut World, mut source: Source<'_>) -> Result<(), String> {
    if world.phase != Phase::Released {
        return Err("this process has its objects".to_owned());
    }
    world.speak_keys();
    world.translate();
    world.all_translate = true;
    // The keys that the application uses belong to the old device from now on.
    for pair in world.queue_pairs() {
        // SAFETY: objects live while the world is locked.
        unsafe { (*pair).lane.visit().plain = false };
    }
    for queue in world.shared_receive_queues() {
        // SAFETY: as above.
        unsafe { (*queue).lane.visit().plain = false };
    }
    // SAFETY: objects live while the world is locked; parents come before the objects made from them.
    unsafe {
        for (id, call) in world.roadmap.calls() {
            if let Some(object) = world.objects.get(&id) {
                make_again(world, id, *object, call, &mut source)?;
            }
        }
    }
    for pair in world.queue_pairs() {
        // SAFETY: as above.
        unsafe {
            if !source.answers.contains_key(&(*pair).id) {
                begin_datagrams(&*pair)?;
            }
        }
    }
    Ok(())
}

/// Starts a queue pair for datagrams, which needs no connection to a peer.
unsafe fn begin_datagrams(pair: &ShadowQp) -> Result<(), String> {
    if pair.face.qp_type != IBV_QPT_UD {
        return Ok(());
    }
    restart(pair, None).map_err(|error| format!("queue pair {}: {error}", pair.face.qp_num))?;
    pair.lane.visit().empty = true;
    Ok(())
}

fn made<T>(made: *mut T, what: &str) -> Result<*mut T, String> {
    if made.is_null() {
        Err(format!(
            "{what} failed: {}",
            std::io::Error::last_os_error()
        ))
    } else {
        Ok(made)
    }
}

unsafe fn make_again(
    world: &World,
    id: ObjectId,
    object: Object,
    call: &Call,
    source: &mut Source<'_>,
) -> Result<(), String> {
    if !object.is_released() {
        // The object was not given back, or an earlier attempt has made it.
        if let Object::Channel(channel) = object {
            let device_channel = (*channel).real.load(Ordering::Acquire);
            show_anew(&*channel, device_channel)
                .map_err(|error| format!("the descriptor for events of completions: {error}"))?;
        }
        return Ok(());
    }
    match object {
        Object::Context(context) => {
            let name = source.device.unwrap_or(&(*context).device_name);
            let opened = open_by_name(name)?;
            if let Err(error) = source.replace_files(id, opened) {
                (real().close_device)(opened);
                return Err(format!("the files of the device: {error}"));
            }
            if let Err(error) = descriptors::put_into((*context).face.async_fd, (*opened).async_fd)
            {
                (real().close_device)(opened);
                return Err(format!("the descriptor for events of the device: {error}"));
            }
            (*context).real.store(opened, Ordering::Release);
        }
        Object::Pd(domain) => {
            let context =
                objects::context((*domain).face.context).map_or(ptr::null_mut(), behind_context);
            (*domain).real.store(
                made(
                    source.make(id, || (real().alloc_pd)(context))?,
                    "ibv_alloc_pd",
                )?,
                Ordering::Release,
            );
        }
        Object::Mr(region) => {
            let domain = behind_pd((*region).face.pd);
            let Call::MemoryRegion { iova, access, .. } = *call else {
                return Ok(());
            };
            let (address, length) = ((*region).face.addr, (*region).face.length);
            let known = (*region).face.rkey;
            let taken = |key| world.is_spoken(key) || world.is_freed(key);
            let allowed = |made: &ibv_mr| made.rkey == known || !taken(made.rkey);
            let most = world.taken_keys();
            let again = register(domain, address, length, iova, access as u32, most, allowed);
            let again = made(again.unwrap_or(ptr::null_mut()), "ibv_reg_mr")?;
            KEYS.set((*region).face.lkey, (*again).lkey);
            (*region)
                .physical_rkey
                .store((*again).rkey, Ordering::Release);
            (*region).real.store(again, Ordering::Release);
        }
        Object::Mw(window) => {
            let Call::MemoryWindow { window_type, .. } = *call else {
                return Ok(());
            };
            let known = windows().get(window.addr()).map(Window::known_name);
            let taken = |name| world.is_spoken_window(name) || world.is_freed_window(name);
            let face = &(*window).face;
            let allowed = |name| known == Some(name) || !taken(name);
            let most = world.taken_names();
            let again = make_window(face.context, behind_pd(face.pd), window_type, most, allowed);
            let again = made(again.unwrap_or(ptr::null_mut()), "ibv_alloc_mw")?;
            windows().made_again(window.addr(), (*again).rkey);
            (*window).real.store(again, Ordering::Release);
        }
        Object::Ah(handle) => {
            let domain = behind_pd((*handle).face.pd);
            made(
                datagrams::make_again(world, &*handle, domain),
                "ibv_create_ah",
            )?;
        }
        Object::Channel(channel) => {
            let context =
                objects::context((*channel).face.context).map_or(ptr::null_mut(), behind_context);
            let again = made(
                source.make(id, || (real().create_comp_channel)(context))?,
                "ibv_create_comp_channel",
            )?;
            let file = source.channels.remove(&id);
            (*channel)
                .made_ahead
                .store(file.is_some(), Ordering::Release);
            if let Some(file) = file {
                // The channel owns the file now and closes it.
                let _given = file.into_raw_fd();
            }
            if let Err(error) = show_anew(&*channel, again) {
                (real().destroy_comp_channel)(again);
                return Err(format!("the descriptor for events of completions: {error}"));
            }
            (*channel).real.store(again, Ordering::Release);
        }
        Object::Cq(queue) => {
            let context =
                objects::context((*queue).face.context).map_or(ptr::null_mut(), behind_context);
            let channel = objects::channel((*queue).face.channel)
                .map_or(ptr::null_mut(), |channel| {
                    channel.real.load(Ordering::Acquire)
                });
            let again = made(
                source.make(id, || {
                    make_cq(
                        context,
                        (*queue).face.cqe,
                        queue.cast(),
                        channel,
                        (*queue).vector,
                    )
                })?,
                "ibv_create_cq",
            )?;
            (*queue)
                .made_ahead
                .store(source.ahead(again), Ordering::Release);
            (*queue).lane.visit().real = again;
        }
        Object::Srq(queue) => {
            let domain = behind_pd((*queue).face.pd);
            let mut attributes = (*queue).init;
            let again = made(
                source.make(id, || make_srq(domain, queue, &mut attributes))?,
                "ibv_create_srq",
            )?;
            (*queue)
                .made_ahead
                .store(source.ahead(again), Ordering::Release);
            let mut lane = (*queue).lane.visit();
            lane.real = again;
            if let Err(errno) = (*queue).post_again(&mut lane) {
                // The next attempt makes a new queue: it could not tell which receives this one has.
                (real().destroy_srq)(again);
                (*queue)
                    .made_ahead
                    .store(ptr::null_mut(), Ordering::Release);
                lane.real = ptr::null_mut();
                return Err(format!(
                    "a shared receive queue took less than before (errno {errno})"
                ));
            }
        }
        Object::Qp(pair) => {
            let domain = behind_pd((*pair).face.pd);
            let again = source.make(id, || make_pair(domain, pair, &(*pair).init, world).0)?;
            let again = made(again, "ibv_create_qp")?;
            (*pair)
                .made_ahead
                .store(source.ahead(again), Ordering::Release);
            (*pair).physical.store((*again).qp_num, Ordering::Release);
            (*pair).lane.visit().real = again;
            for queue in [(*pair).face.send_cq, (*pair).face.recv_cq] {
                if let Some(queue) = objects::cq(queue) {
                    add_route(queue, (*again).qp_num, pair);
                }
            }
        }
    }
    Ok(())
}

/// Makes the application's descriptor announce events of the device's channel.
unsafe fn show_anew(channel: &ShadowChannel, device: *mut ibv_comp_channel) -> io::Result<()> {
    lead(channel, &mut state(channel), Some((*device).fd))
}

fn behind_context(context: &ShadowContext) -> *mut ibv_context {
    context.real.load(Ordering::Acquire)
}

unsafe fn behind_pd(domain: *mut ibv_pd) -> *mut ibv_pd {
    objects::pd(domain).map_or(ptr::null_mut(), |domain| {
        domain.real.load(Ordering::Acquire)
    })
}

pub(in crate::shim) unsafe fn open_by_name(name: &str) -> Result<*mut ibv_context, String> {
    let mut count = 0;
    let list = (real().get_device_list)(&raw mut count);
    if list.is_null() {
        return Err("this host has no RDMA device".to_owned());
    }
    let found = (0..count as usize)
        .map(|place| *list.add(place))
        .find(|device| {
            std::ffi::CStr::from_ptr((real().get_device_name)(*device)).to_bytes()
                == name.as_bytes()
        });
    let opened = found.map(|device| (real().open_device)(device));
    (real().free_device_list)(list);
    match opened {
        None => Err(format!("this host has no RDMA device {name}")),
        Some(context) => made(context, "ibv_open_device"),
    }
}
