//! An etcd as witness, over its JSON gateway: a key for each protection, changed by transactions that compare the key's
//! revision.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use godwit_protect::Grant;
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, Identity, StatusCode};
use serde_json::{Value, json};

use super::spec::host_of;
use super::{Answer, Change, Protection, Swap, Witness, WitnessError};

/// Time limit for a connection to one member.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Time limit for an answer of one member.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);
/// Time limit for a whole request, with all members.
const WITHIN: Duration = Duration::from_secs(10);
/// Longest answer in bytes.
const LONGEST: usize = 64 << 10;
/// gRPC's codes of a wrong request, a missing right, and a missing or old token.
const INVALID: u64 = 3;
const DENIED: u64 = 7;
const UNAUTHENTICATED: u64 = 16;

/// The options of all uses of etcd by a node: lines `NAME = VALUE`.
#[derive(Default)]
struct Options {
    user: Option<String>,
    password: Option<String>,
    /// The file with the authority of the members' certificates. Without it, members are on loopback, without TLS.
    ca: Option<String>,
    /// The files with this node's own certificate and key.
    cert: Option<String>,
    key: Option<String>,
}

impl Options {
    fn parse(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        let lines = text.lines().map(str::trim).enumerate();
        for (at, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let (name, value) = line.split_once('=').unwrap_or((line, ""));
            let field = match name.trim() {
                "user" => &mut options.user,
                "password" => &mut options.password,
                "ca" => &mut options.ca,
                "cert" => &mut options.cert,
                "key" => &mut options.key,
                // The line may have a password in it.
                _ => {
                    return Err(format!(
                        "line {} is none of 'user = …', 'password = …', 'ca = FILE', 'cert = FILE', 'key = FILE'",
                        at + 1
                    ));
                }
            };
            *field = Some(value.trim().to_owned());
        }
        let is_pair = |one: &Option<String>, two: &Option<String>| one.is_some() == two.is_some();
        if !is_pair(&options.user, &options.password) || !is_pair(&options.cert, &options.key) {
            return Err(String::from(
                "'user' needs 'password', and 'cert' needs 'key'",
            ));
        }
        if options.cert.is_some() && options.ca.is_none() {
            return Err(String::from("'cert' needs 'ca'"));
        }
        Ok(options)
    }
}

/// An etcd, with the way to its members.
#[derive(Debug)]
pub(super) struct EtcdWitness {
    client: Client,
    /// The members' addresses as URLs.
    members: Vec<String>,
    prefix: String,
    /// Body of a request for a token.
    login: Option<Vec<u8>>,
    token: Mutex<Option<String>>,
    /// The member that answered last.
    last: AtomicUsize,
}

/// The reason why one member gave no answer.
enum Failure {
    /// The request did not arrive.
    NotSent(String),
    /// The request may have arrived.
    Silent(String),
    /// The member refused before it did anything.
    Refused { code: u64, why: String },
}

impl Failure {
    fn of_read(self) -> WitnessError {
        match self {
            Self::NotSent(why) | Self::Silent(why) => WitnessError::Unreachable(why),
            Self::Refused { why, .. } => WitnessError::Unusable(why),
        }
    }

    fn of_change(self) -> WitnessError {
        match self {
            Self::Silent(why) => WitnessError::Unknown(why),
            other => other.of_read(),
        }
    }
}

impl EtcdWitness {
    /// Creates the witness. Reads the options, and asks nobody.
    ///
    /// # Errors
    /// A sentence: the options are wrong, or the members are not on loopback and have no TLS.
    pub(super) fn new(
        endpoints: &[String],
        prefix: &str,
        options: Option<&Path>,
    ) -> Result<Self, String> {
        let options = match options {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
                let parsed = text.and_then(|text| Options::parse(&text));
                parsed.map_err(|why| format!("the options for etcd, {}: {why}", path.display()))?
            }
            None => Options::default(),
        };
        let is_local = |host: &str| {
            let address = host.parse::<std::net::IpAddr>();
            host == "localhost" || address.is_ok_and(|address| address.is_loopback())
        };
        let scheme = match &options.ca {
            Some(_) => "https",
            None => "http",
        };
        let hosts = endpoints.iter().filter_map(|endpoint| host_of(endpoint));
        if options.ca.is_none()
            && let Some(host) = hosts.into_iter().find(|host| !is_local(host))
        {
            return Err(format!(
                "an etcd without TLS is used on loopback alone, and '{host}' is elsewhere: write 'ca = FILE' into the file \
                 of --etcd-options"
            ));
        }
        let login = options.user.as_ref().map(|user| {
            let login = json!({ "name": user, "password": options.password });
            login.to_string().into_bytes()
        });
        Ok(Self {
            client: client(&options)?,
            members: endpoints
                .iter()
                .map(|endpoint| format!("{scheme}://{endpoint}/v3/"))
                .collect(),
            prefix: prefix.to_owned(),
            login,
            token: Mutex::default(),
            last: AtomicUsize::new(0),
        })
    }

    fn key(&self, of: &Protection) -> String {
        BASE64_STANDARD.encode(format!("{}/{}", self.prefix, of.id))
    }

    fn token(&self) -> Option<String> {
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        token.clone()
    }

    fn set_token(&self, token: Option<String>) {
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = token;
    }

    /// Sends a request to one member.
    async fn send(&self, member: &str, path: &str, body: Vec<u8>) -> Result<Value, Failure> {
        let request = self.client.post(format!("{member}{path}")).body(body);
        let request = match self.token() {
            Some(token) => request.header("authorization", token),
            None => request,
        };
        let failed = |error: reqwest::Error| {
            let why = format!("the etcd at {member} does not answer: {}", cause(&error));
            match error.is_connect() || error.is_builder() {
                true => Failure::NotSent(why),
                false => Failure::Silent(why),
            }
        };
        let mut answer = request.send().await.map_err(failed)?;
        let mut bytes = Vec::new();
        while let Some(part) = answer.chunk().await.map_err(failed)? {
            bytes.extend_from_slice(&part);
            if bytes.len() > LONGEST {
                let why = format!("the etcd at {member} gives an answer that is too long");
                return Err(Failure::Silent(why));
            }
        }
        let status = answer.status();
        let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if status.is_success() && value["header"].is_object() {
            return Ok(value);
        }
        let text = String::from_utf8_lossy(&bytes);
        let said = value["error"].as_str().unwrap_or(&text).chars();
        let said: String = said.filter(|c| !c.is_control()).take(256).collect();
        let why = format!("the etcd at {member}: {said} ({status})");
        let code = match &value {
            // The gateway itself refuses in plain text.
            Value::Null if status == StatusCode::BAD_REQUEST => Some(INVALID),
            value => value["code"].as_u64(),
        };
        match code {
            Some(code @ (INVALID | DENIED | UNAUTHENTICATED)) => {
                Err(Failure::Refused { code, why })
            }
            _ => Err(Failure::Silent(why)),
        }
    }

    /// Sends a request to one member, with a new token if the present one is void.
    async fn ask(&self, member: &str, path: &str, body: &Value) -> Result<Value, Failure> {
        let body = body.to_string().into_bytes();
        let Some(login) = &self.login else {
            return self.send(member, path, body).await;
        };
        if self.token().is_some() {
            match self.send(member, path, body.clone()).await {
                Err(Failure::Refused {
                    code: UNAUTHENTICATED,
                    ..
                }) => {}
                other => return other,
            }
        }
        self.set_token(None);
        // Nothing is changed by a login.
        let logged_in = self.send(member, "auth/authenticate", login.clone()).await;
        let logged_in = logged_in.map_err(|failure| match failure {
            Failure::Silent(why) => Failure::NotSent(why),
            other => other,
        })?;
        self.set_token(logged_in["token"].as_str().map(str::to_owned));
        self.send(member, path, body).await
    }

    /// Asks the members in turn, beginning with the last that answered, until a request has arrived at one of them, or,
    /// if the request changes nothing, until one answers.
    async fn ask_all(&self, path: &str, body: &Value, reads: bool) -> Result<Value, Failure> {
        let first = self.last.load(Ordering::Relaxed);
        let mut failure = Failure::NotSent(String::from("the etcd has no member"));
        for turn in 0..self.members.len() {
            let at = (first + turn) % self.members.len();
            failure = match self.ask(&self.members[at], path, body).await {
                Ok(value) => {
                    self.last.store(at, Ordering::Relaxed);
                    return Ok(value);
                }
                Err(it @ Failure::NotSent(_)) => it,
                Err(it @ Failure::Silent(_)) if reads => it,
                Err(other) => return Err(other),
            };
        }
        Err(failure)
    }

    /// Reads a grant and the revision of its key.
    async fn read(&self, of: &Protection) -> Result<(Option<Grant>, String), WitnessError> {
        let body = json!({ "key": self.key(of) });
        let asked = self.ask_all("kv/range", &body, true);
        let answer = tokio::time::timeout(WITHIN, asked).await;
        let answer = answer.map_err(|_| WitnessError::Unreachable(silent()))?;
        entry(&answer.map_err(Failure::of_read)?)
    }

    async fn change(&self, of: &Protection, change: Change) -> Result<Swap, WitnessError> {
        change.check()?;
        let (present, revision) = self.read(of).await?;
        if present != change.expected {
            return Ok(change.outcome(present));
        }
        let key = self.key(of);
        let success = match change.wanted {
            Some(grant) => {
                let value = BASE64_STANDARD.encode(json!(grant).to_string());
                json!({ "request_put": { "key": key, "value": value } })
            }
            None => json!({ "request_delete_range": { "key": key } }),
        };
        let body = json!({
            "compare": [{ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision }],
            "success": [success],
            "failure": [{ "request_range": { "key": key } }],
        });
        let asked = self.ask_all("kv/txn", &body, false);
        let answer = tokio::time::timeout(WITHIN, asked).await;
        let answer = answer.map_err(|_| WitnessError::Unknown(silent()))?;
        let answer = answer.map_err(Failure::of_change)?;
        if answer["succeeded"] == true {
            return Ok(Swap::Done);
        }
        // Another node has changed the grant since.
        let (present, _) = entry(&answer["responses"][0]["response_range"])?;
        Ok(change.outcome(present))
    }
}

impl Witness for EtcdWitness {
    fn grant<'a>(&'a self, of: &'a Protection) -> Answer<'a, Option<Grant>> {
        Box::pin(async { Ok(self.read(of).await?.0) })
    }

    fn swap<'a>(&'a self, of: &'a Protection, change: Change) -> Answer<'a, Swap> {
        Box::pin(self.change(of, change))
    }
}

fn silent() -> String {
    format!(
        "no member of the etcd answers within {} seconds",
        WITHIN.as_secs()
    )
}

/// Returns the innermost cause of a client's error: the outer ones repeat the address.
fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Reads the grant and revision in an answer. An absent key has revision 0.
fn entry(range: &Value) -> Result<(Option<Grant>, String), WitnessError> {
    let damaged = |why: &str| WitnessError::Unusable(format!("the etcd's key is no grant: {why}"));
    if !range["header"].is_object() {
        return Err(WitnessError::Unknown(String::from(
            "an answer is no etcd's",
        )));
    }
    let Some(found) = range["kvs"].get(0) else {
        return Ok((None, String::from("0")));
    };
    let revision = found["mod_revision"].as_str();
    let revision = revision.ok_or_else(|| damaged("it has no revision"))?;
    let value = BASE64_STANDARD.decode(found["value"].as_str().unwrap_or_default());
    let value = value.map_err(|error| damaged(&error.to_string()))?;
    let grant = serde_json::from_slice(&value).map_err(|error| damaged(&error.to_string()))?;
    Ok((Some(grant), revision.to_owned()))
}

fn client(options: &Options) -> Result<Client, String> {
    let read = |file: &String| std::fs::read(file).map_err(|error| format!("{file}: {error}"));
    let mut builder = Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .connect_timeout(CONNECT_WITHIN)
        .timeout(ANSWER_WITHIN);
    if let Some(file) = &options.ca {
        let authorities = Certificate::from_pem_bundle(&read(file)?);
        let authorities = authorities.map_err(|error| format!("{file}: {}", cause(&error)))?;
        builder = builder.tls_certs_only(authorities);
    }
    if let (Some(cert), Some(key)) = (&options.cert, &options.key) {
        let both = [read(cert)?, read(key)?].join(&b'\n');
        let identity = Identity::from_pem(&both);
        let identity = identity.map_err(|error| format!("{cert}, {key}: {}", cause(&error)))?;
        builder = builder.identity(identity);
    }
    let built = builder.build();
    built.map_err(|error| format!("the client for etcd: {}", cause(&error)))
}
