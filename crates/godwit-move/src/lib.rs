//! The course of a move of a disk, a machine, a process or a container from one node to another.
//!
//! This crate only decides. Both ends have a state that their node stores durably before acting on it:
//!
//! - The source keeps a [`Course`]. Its node stores the course, carries out [`Course::step`] and reports the
//!   [`Outcome`] with [`Course::happened`] until [`Step::End`]. After a death [`Course::recover`] returns to a safe
//!   step.
//! - The destination keeps an [`Arrival`]. Its node reports [`Order`]s of the source and outcomes of its own, stores the
//!   arrival and carries out the returned [`Act`].
//!
//! One step is the point of no return. [`Step::Decide`] has one durable effect, at the end that decides
//! ([`Subject::decider`]), and the other end asks until it has an answer:
//!
//! ```text
//!  a process or container: the destination decides      a disk or machine: the source decides
//!
//!  source                       destination             source                       destination
//!    │ Copy .. Freeze .. Send       │                     │ Copy .. Stop .. Send         │
//!    │════════ the image ══════════►│ Coming              │════════ the state ══════════►│ Coming
//!    │── Run ──────────────────────►│ Starting            │ Decide: stores that it gave   │
//!    │                              │ stores Here, Never  │── Word(Given) ──────────────►│ Starting
//!    │◄────────── Here or NotHere ──│                     │◄─────────────────────── Here ──│ Here
//!    │ in doubt: Settle             │                     │          in doubt: Ask        │
//!    │── Settle ───────────────────►│                     │◄──────────────────────── Ask ──│
//!    │◄────────── Here or NotHere ──│                     │── Word(Given, Kept, ..) ─────►│
//!    │── Over ─────────────────────►│ forgets             │── Over ─────────────────────►│ forgets
//! ```
//!
//! Before the point of no return every failure leads back, and the subject goes on at the source. After it every
//! failure is made up for at the destination. `tests/move_model` tries every order of faults, deaths and lost messages.

mod arrival;
mod course;
mod message;
mod refusal;
mod subject;

pub use arrival::{Act, Arrival, Started};
pub use course::{Course, Ending, MAX_TRIES, Outcome};
pub use message::{Answer, Order, Word};
pub use refusal::{Kind, Refusal};
pub use subject::{Decider, Plane, Progress, Step, Subject};
