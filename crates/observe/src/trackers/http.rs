//! Requests to the server of a tracker: one JSON object there, one back. Redirects are not followed, and what an address
//! or a token contains is never part of a message.

use std::fmt;
use std::io::Read as _;
use std::time::Duration;

use serde_json::Value;
use ureq::Agent;
use ureq::http::Uri;
use zeroize::Zeroizing;

const USER_AGENT: &str = concat!("lockstep/", env!("CARGO_PKG_VERSION"));
const TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer.
const ANSWER_BYTES: u64 = 1 << 20;
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The address of a tracker's server, with what it needs to know its user.
#[derive(Clone)]
pub struct ServerAddress {
    /// Without a user name, and without a slash at the end.
    base: String,
    /// The name and value of a header.
    secret: Option<(&'static str, Zeroizing<String>)>,
}

/// An address that is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address must begin with http:// or https:// and name a host")]
pub struct BadAddress;

impl ServerAddress {
    /// Reads an address such as `http://localhost:5000`. A user name and a password in it are sent in a header.
    pub fn parse(text: &str) -> Result<ServerAddress, BadAddress> {
        let (scheme, rest) = text.trim().split_once("://").ok_or(BadAddress)?;
        let authority_len = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(authority_len);
        let (user, host) =
            authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let base = format!("{scheme}://{host}{path}");
        let uri: Uri = base.parse().map_err(|_| BadAddress)?;
        if host.is_empty() || !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(BadAddress);
        }
        let address = ServerAddress { base, secret: None };
        Ok(match user.and_then(|user| user.split_once(':')) {
            Some((name, password)) => {
                address.with_password(&percent_decoded(name), &percent_decoded(password))
            }
            None => address,
        })
    }

    /// With a name and a password for HTTP's basic authentication.
    #[must_use]
    pub fn with_password(mut self, name: &str, password: &str) -> ServerAddress {
        let both = Zeroizing::new(format!("{name}:{password}"));
        self.secret = Some(("Authorization", Zeroizing::new(format!("Basic {}", base64(both.as_bytes())))));
        self
    }

    /// With a bearer token.
    #[must_use]
    pub fn with_token(self, token: &str) -> ServerAddress {
        self.with_header("Authorization", format!("Bearer {}", token.trim()))
    }

    /// With a secret in a header. A value that cannot be sent in one is left out.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: String) -> ServerAddress {
        let value = Zeroizing::new(value);
        if value.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
            self.secret = Some((name, value));
        }
        self
    }
}

impl fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerAddress({})", self.base)
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server cannot be reached, or is busy: a later attempt may work.
    Later(String),
    /// Trying again would not help.
    Refused { status: u16, answer: Value, text: String },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Later(why) => f.write_str(why),
            Failure::Refused { text, .. } => f.write_str(text),
        }
    }
}

/// A server, and the connection to it.
pub(crate) struct Server {
    address: ServerAddress,
    agent: Agent,
}

impl Server {
    pub(crate) fn new(address: &ServerAddress) -> Server {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(TIMEOUT))
            .user_agent(USER_AGENT);
        let host = address.base.split("://").nth(1).unwrap_or_default();
        // A server on this machine is not behind the proxy.
        if host.starts_with("localhost") || host.starts_with("127.") || host.starts_with("[::1]") {
            config = config.proxy(None);
        }
        Server { address: address.clone(), agent: config.build().into() }
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        let url = format!("{}{path}", self.address.base);
        let mut request = self.agent.post(&url).header("Content-Type", "application/json");
        if let Some((name, value)) = &self.address.secret {
            request = request.header(*name, value.as_str());
        }
        self.answer(request.send(body.to_string().as_bytes()))
    }

    pub(crate) fn get(&self, path: &str) -> Result<Value, Failure> {
        let mut request = self.agent.get(format!("{}{path}", self.address.base));
        if let Some((name, value)) = &self.address.secret {
            request = request.header(*name, value.as_str());
        }
        self.answer(request.call())
    }

    fn answer(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, Failure> {
        let base = &self.address.base;
        let response = response.map_err(|error| match error {
            ureq::Error::HostNotFound => Failure::Later(format!("the host of {base} cannot be resolved")),
            ureq::Error::Timeout(_) => Failure::Later(format!("{base} does not answer")),
            ureq::Error::Io(cause) => Failure::Later(format!("{base} cannot be reached ({cause})")),
            _ => Failure::Later(format!("{base} cannot be reached")),
        })?;
        let status = response.status().as_u16();
        let mut bytes = Vec::new();
        let read = response.into_body().into_reader().take(ANSWER_BYTES).read_to_end(&mut bytes);
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        match status {
            200..300 if read.is_ok() => Ok(answer),
            200..300 | 429 | 500..600 => Err(Failure::Later(format!("{base} answers with status {status}"))),
            _ => {
                Err(Failure::Refused { status, answer, text: format!("{base} answers with status {status}") })
            }
        }
    }
}

/// Text for a URL's query.
pub(crate) fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

fn percent_decoded(text: &str) -> Zeroizing<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        match (bytes[at], hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                at += 3;
            }
            (byte, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    Zeroizing::new(String::from_utf8_lossy(&out).into_owned())
}

fn base64(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(chunk.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = BASE64[(bits >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_split_from_addresses() {
        let address = ServerAddress::parse("http://me:p%40ss@host:5000/base/?q=1").unwrap();
        assert_eq!(format!("{address:?}"), "ServerAddress(http://host:5000/base)");
        let (name, value) = address.secret.as_ref().unwrap();
        assert_eq!((*name, value.as_str()), ("Authorization", "Basic bWU6cEBzcw=="));
        let address = ServerAddress::parse("https://host").unwrap().with_token(" abc\n");
        assert_eq!(address.secret.unwrap().1.as_str(), "Bearer abc");
        for text in ["", "host:5000", "file:///tmp/x", "http://", "http://a b"] {
            assert!(ServerAddress::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn known_encodings() {
        assert_eq!(
            ["", "f", "fo", "foo", "foob"].map(|t| base64(t.as_bytes())),
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]
        );
        assert_eq!(percent_encoded("a b/ä"), "a%20b%2F%C3%A4");
        assert_eq!(percent_decoded("a%20b%2").as_str(), "a b%2");
    }
}
