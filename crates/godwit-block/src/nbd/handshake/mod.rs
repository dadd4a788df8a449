//! The handshake: from the connection's first byte to the transmission phase.

mod option;
mod reply;
mod types;

use core::mem;

use option::{ClientOption, export_name};
pub use types::{
    ExportInfo, ExportRefusal, HandshakeConfig, HandshakeError, HandshakeStep, Negotiated,
    TlsPolicy,
};

use super::constants::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, MAX_STRING, OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO,
    OPT_LIST, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_STARTTLS, OPT_STRUCTURED_REPLY,
    REP_ACK, REP_ERR_INVALID, REP_ERR_POLICY, REP_ERR_TLS_REQD, REP_ERR_TOO_BIG, REP_ERR_UNSUP,
};

/// The handshake of a client.
///
/// Order of calls: [`Handshake::poll`] until [`HandshakeStep::Receive`], each step carried out before the next poll;
/// then [`Handshake::receive`], and again.
///
/// ```
/// # use godwit_block::nbd::*;
/// # use std::io::{Read, Write};
/// fn serve(mut client: impl Read + Write, disk: ExportInfo) -> std::io::Result<Option<Negotiated>> {
///     let mut handshake = Handshake::new(HandshakeConfig::new(TlsPolicy::Off));
///     loop {
///         match handshake.poll() {
///             HandshakeStep::Receive => {
///                 let mut buffer = [0; 4096];
///                 match client.read(&mut buffer)? {
///                     0 => return Ok(None),
///                     count => handshake.receive(&buffer[..count]),
///                 }
///             }
///             HandshakeStep::Send(bytes) => client.write_all(&bytes)?,
///             HandshakeStep::NeedExport { name, .. } if name == "disk" => handshake.export(Ok(disk)),
///             HandshakeStep::NeedExport { name, .. } => {
///                 handshake.export(Err(ExportRefusal::Unknown(format!("no disk named {name:?}"))))
///             }
///             HandshakeStep::List => handshake.list(["disk"]),
///             HandshakeStep::Done(negotiated) => return Ok(Some(negotiated)),
///             HandshakeStep::StartTls | HandshakeStep::Aborted | HandshakeStep::Failed(_) => {
///                 return Ok(None);
///             }
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Handshake {
    config: HandshakeConfig,
    state: State,
    input: Vec<u8>,
    output: Vec<u8>,
    options: u32,
    tls: bool,
    fixed: bool,
    no_zeroes: bool,
    structured_replies: bool,
    /// Export for which the client selected `base:allocation`.
    allocation_of: Option<String>,
}

/// The next step, once the output is sent.
#[derive(Debug)]
enum State {
    /// Receive the client's flags.
    Flags,
    /// Receive an option.
    Options,
    /// Ask the caller for an export. `allocation`: an option about contexts asks for `base:allocation`.
    Export {
        option: u32,
        name: String,
        allocation: bool,
    },
    /// Ask the caller for the names of the exports.
    List,
    /// Wait for the caller to start TLS.
    Tls,
    /// The end, not reported yet.
    Ending(HandshakeStep),
    /// The end, reported.
    Over,
}

impl Handshake {
    /// Returns the handshake with a client that has just connected: the server speaks first.
    pub fn new(config: HandshakeConfig) -> Self {
        Self {
            config,
            state: State::Flags,
            input: Vec::new(),
            output: reply::greeting(),
            options: 0,
            tls: false,
            fixed: false,
            no_zeroes: false,
            structured_replies: false,
            allocation_of: None,
        }
    }

    /// Takes bytes from the client. Bytes are kept until they can be parsed: to bound the memory, call this only when
    /// [`HandshakeStep::Receive`] asks, with at most a few KiB.
    pub fn receive(&mut self, bytes: &[u8]) {
        if !matches!(self.state, State::Over) {
            self.input.extend_from_slice(bytes);
        }
    }

    /// Returns the next step.
    pub fn poll(&mut self) -> HandshakeStep {
        loop {
            if !self.output.is_empty() {
                return HandshakeStep::Send(mem::take(&mut self.output));
            }
            let advanced = match &mut self.state {
                State::Flags => self.take_flags(),
                State::Options => self.take_option(),
                State::Export { option, name, .. } => {
                    let (name, enters) = (name.clone(), enters(*option));
                    return HandshakeStep::NeedExport { name, enters };
                }
                State::List => return HandshakeStep::List,
                State::Tls => return HandshakeStep::StartTls,
                State::Over => return HandshakeStep::Failed(HandshakeError::Over),
                State::Ending(step) => {
                    let step = mem::replace(step, HandshakeStep::Receive);
                    self.state = State::Over;
                    return step;
                }
            };
            match advanced {
                Ok(true) => {}
                Ok(false) => return HandshakeStep::Receive,
                Err(error) => self.fail(error),
            }
        }
    }

    /// Answers [`HandshakeStep::NeedExport`]; does nothing without the question.
    pub fn export(&mut self, answer: Result<ExportInfo, ExportRefusal>) {
        let (option, name, allocation) = match mem::replace(&mut self.state, State::Options) {
            State::Export {
                option,
                name,
                allocation,
            } => (option, name, allocation),
            other => return self.state = other,
        };
        match answer {
            Ok(_) if is_about_contexts(option) => self.contexts(option, name, allocation),
            Ok(info) => {
                if option == OPT_EXPORT_NAME {
                    let zeroes = !self.no_zeroes;
                    reply::push_export(&mut self.output, info, self.structured_replies, zeroes);
                } else {
                    reply::push_info(&mut self.output, option, info, self.structured_replies);
                }
                if enters(option) {
                    let base_allocation = self.allocation_of.as_ref() == Some(&name);
                    self.state = State::Ending(HandshakeStep::Done(Negotiated {
                        export: name,
                        info,
                        structured_replies: self.structured_replies,
                        base_allocation,
                        leftover: mem::take(&mut self.input),
                    }));
                }
            }
            Err(refusal) if option == OPT_EXPORT_NAME => {
                self.fail(HandshakeError::ExportRefused(refusal.text().to_owned()));
            }
            Err(refusal) => self.refuse(option, refusal.kind(), refusal.text()),
        }
    }

    /// Answers an option about contexts of an existing export.
    fn contexts(&mut self, option: u32, export: String, allocation: bool) {
        let listed = option == OPT_LIST_META_CONTEXT;
        if allocation {
            reply::push_allocation_context(&mut self.output, option, listed);
        }
        if allocation && !listed {
            self.allocation_of = Some(export);
        }
        self.acknowledge(option);
    }

    /// Answers [`HandshakeStep::List`]; does nothing without the question. Names longer than the protocol's 4096 bytes
    /// are left out.
    pub fn list<N: AsRef<str>>(&mut self, names: impl IntoIterator<Item = N>) {
        if !matches!(self.state, State::List) {
            return;
        }
        self.state = State::Options;
        for name in names {
            let name = name.as_ref();
            if name.len() <= MAX_STRING {
                reply::push_server(&mut self.output, OPT_LIST, name);
            }
        }
        self.acknowledge(OPT_LIST);
    }

    /// Reports that TLS is up, as [`HandshakeStep::StartTls`] asked: bytes received from now on came through TLS. Does
    /// nothing without the question.
    pub fn tls_done(&mut self) {
        if matches!(self.state, State::Tls) {
            self.tls = true;
            self.state = State::Options;
        }
    }

    /// Reads the client's flags. Returns false if they are incomplete.
    fn take_flags(&mut self) -> Result<bool, HandshakeError> {
        let Some(flags) = self.input.first_chunk().copied().map(u32::from_be_bytes) else {
            return Ok(false);
        };
        self.input.drain(..4);
        if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
            return Err(HandshakeError::ClientFlags(flags));
        }
        self.fixed = flags & u32::from(FLAG_FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
        self.state = State::Options;
        Ok(true)
    }

    /// Reads an option and acts on it. Returns false if the option is incomplete.
    fn take_option(&mut self) -> Result<bool, HandshakeError> {
        let option = match ClientOption::take(&mut self.input, self.config.max_option_length) {
            Ok(Some(option)) => option,
            Ok(None) => return Ok(false),
            Err(error) => {
                if let (true, HandshakeError::OptionTooLong { option, .. }) = (self.fixed, &error) {
                    self.refuse(*option, REP_ERR_TOO_BIG, "the option is too long");
                }
                return Err(error);
            }
        };
        self.options += 1;
        if self.options > self.config.max_options {
            return Err(HandshakeError::TooManyOptions(self.config.max_options));
        }
        if !self.fixed && option.number != OPT_EXPORT_NAME {
            return Err(HandshakeError::NotFixedNewstyle(option.number));
        }
        if self.config.tls == TlsPolicy::Required && !self.tls {
            self.act_before_tls(&option)?;
        } else {
            self.act(&option)?;
        }
        Ok(true)
    }

    /// Acts on an option of a client that has yet to start TLS.
    fn act_before_tls(&mut self, option: &ClientOption) -> Result<(), HandshakeError> {
        let number = option.number;
        match number {
            OPT_STARTTLS if !option.data.is_empty() => {
                self.refuse(number, REP_ERR_INVALID, "NBD_OPT_STARTTLS takes no data");
            }
            OPT_STARTTLS if !self.input.is_empty() => {
                return Err(HandshakeError::PlaintextAfterStartTls);
            }
            OPT_STARTTLS => {
                self.acknowledge(number);
                self.state = State::Tls;
            }
            OPT_ABORT => self.abort(),
            OPT_EXPORT_NAME => {
                return Err(HandshakeError::ExportRefused("TLS is required".to_owned()));
            }
            _ => self.refuse(
                number,
                REP_ERR_TLS_REQD,
                "this server requires TLS: use an nbds:// URI with a client certificate",
            ),
        }
        Ok(())
    }

    /// Acts on an option of a client that may use all of them.
    fn act(&mut self, option: &ClientOption) -> Result<(), HandshakeError> {
        let number = option.number;
        match number {
            OPT_EXPORT_NAME => match export_name(&option.data) {
                Some(name) => {
                    self.state = State::Export {
                        option: number,
                        name,
                        allocation: false,
                    }
                }
                None => {
                    return Err(HandshakeError::ExportRefused(
                        "the name is not one an export can have".to_owned(),
                    ));
                }
            },
            OPT_INFO | OPT_GO => match option.requested_export() {
                Some(name) => {
                    self.state = State::Export {
                        option: number,
                        name,
                        allocation: false,
                    }
                }
                None => self.refuse(
                    number,
                    REP_ERR_INVALID,
                    "the option's data is malformed, or the name is not one an export can have",
                ),
            },
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.ask_for_contexts(option),
            OPT_ABORT => self.abort(),
            OPT_LIST | OPT_STRUCTURED_REPLY | OPT_STARTTLS if !option.data.is_empty() => {
                self.refuse(number, REP_ERR_INVALID, "the option takes no data");
            }
            OPT_LIST => self.state = State::List,
            OPT_STRUCTURED_REPLY => {
                self.structured_replies = true;
                self.acknowledge(number);
            }
            OPT_STARTTLS if self.tls => {
                self.refuse(number, REP_ERR_INVALID, "TLS is already up");
            }
            OPT_STARTTLS => {
                self.refuse(
                    number,
                    REP_ERR_POLICY,
                    "this server does not offer TLS here",
                );
            }
            _ => self.refuse(number, REP_ERR_UNSUP, "the option is not supported"),
        }
        Ok(())
    }

    /// Begins to answer an option about contexts. An earlier selection ends, regardless of the outcome.
    fn ask_for_contexts(&mut self, option: &ClientOption) {
        let number = option.number;
        if number == OPT_SET_META_CONTEXT {
            self.allocation_of = None;
        }
        if !self.structured_replies {
            let text = "negotiate structured replies before metadata contexts";
            return self.refuse(number, REP_ERR_INVALID, text);
        }
        match option.requested_contexts() {
            Some(request) => {
                self.state = State::Export {
                    option: number,
                    name: request.export,
                    allocation: request.allocation,
                }
            }
            None => self.refuse(number, REP_ERR_INVALID, "the option's data is malformed"),
        }
    }

    fn acknowledge(&mut self, option: u32) {
        reply::push(&mut self.output, option, REP_ACK, &[]);
    }

    fn refuse(&mut self, option: u32, kind: u32, text: &str) {
        reply::push_error(&mut self.output, option, kind, text);
    }

    fn abort(&mut self) {
        self.acknowledge(OPT_ABORT);
        self.state = State::Ending(HandshakeStep::Aborted);
    }

    fn fail(&mut self, error: HandshakeError) {
        self.state = State::Ending(HandshakeStep::Failed(error));
    }
}

/// Returns true if the transmission phase follows the option's success.
const fn enters(option: u32) -> bool {
    matches!(option, OPT_GO | OPT_EXPORT_NAME)
}

const fn is_about_contexts(option: u32) -> bool {
    matches!(option, OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT)
}
