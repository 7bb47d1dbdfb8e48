//! Reads requests from a connection: only their heads, for no request here has a body.

use std::io::{self, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The most bytes of a request.
const MAX_HEAD_BYTES: usize = 16 * 1024;
const MAX_HEADERS: usize = 64;
/// A connection without a request is closed after this time.
const IDLE: Duration = Duration::from_secs(20);
/// A request must have arrived this long after its first byte.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// A request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    /// The parameters after `?`, decoded.
    pub(crate) query: Vec<(String, String)>,
    pub(crate) host: Option<String>,
    pub(crate) authorization: Option<String>,
    pub(crate) cookies: Vec<(String, String)>,
    /// From where a browser makes the request: `same-origin`, `cross-site`, …
    pub(crate) fetch_site: Option<String>,
    pub(crate) closes: bool,
}

impl Request {
    pub(crate) fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// A parameter as a number; one that is no number counts as missing.
    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.parameter(name)?.parse().ok()
    }
}

/// Why a request cannot be answered as it is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadRequest {
    /// Not HTTP, or no single host.
    Malformed,
    TooLarge,
    TooSlow,
    HasBody,
}

/// What came over a connection.
pub(crate) enum Received {
    Request(Box<Request>),
    Bad(BadRequest),
    /// The other side has gone, or has asked nothing for a while.
    Closed,
}

/// Reads requests one after the other.
pub(crate) struct RequestReader {
    /// Bytes that are read and not parsed yet.
    pending: Vec<u8>,
}

impl RequestReader {
    pub(crate) fn new() -> RequestReader {
        RequestReader { pending: Vec::new() }
    }

    /// Waits for the next request, for a limited time.
    pub(crate) fn next(&mut self, stream: &mut TcpStream) -> Received {
        let idle_until = Instant::now() + IDLE;
        let mut begun = (!self.pending.is_empty()).then(Instant::now);
        loop {
            match parse(&self.pending) {
                Ok(Some((request, len))) => {
                    self.pending.drain(..len);
                    return Received::Request(Box::new(request));
                }
                Ok(None) if self.pending.len() >= MAX_HEAD_BYTES => {
                    return Received::Bad(BadRequest::TooLarge);
                }
                Ok(None) => {}
                Err(bad) => return Received::Bad(bad),
            }
            let deadline = begun.map_or(idle_until, |begun| begun + HEAD_TIME);
            let left = deadline.saturating_duration_since(Instant::now());
            let late = if begun.is_some() { Received::Bad(BadRequest::TooSlow) } else { Received::Closed };
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return late;
            }
            let mut bytes = [0; 4096];
            let room = bytes.len().min(MAX_HEAD_BYTES - self.pending.len());
            match stream.read(&mut bytes[..room]) {
                Ok(0) => return Received::Closed,
                Ok(len) => self.pending.extend_from_slice(&bytes[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return late;
                }
                Err(_) => return Received::Closed,
            }
            begun.get_or_insert_with(Instant::now);
        }
    }
}

/// The first request of some bytes and its length. `None`: it is not complete.
fn parse(bytes: &[u8]) -> Result<Option<(Request, usize)>, BadRequest> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let len = match head.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(BadRequest::TooLarge),
        Err(_) => return Err(BadRequest::Malformed),
    };
    let target = head.path.unwrap_or_default();
    // A proxy's form of the target has a host of its own.
    if !target.starts_with('/') {
        return Err(BadRequest::Malformed);
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method: head.method.unwrap_or_default().into(),
        path: decoded(path).ok_or(BadRequest::Malformed)?,
        query: parameters(query),
        closes: head.version == Some(0),
        ..Request::default()
    };
    for header in head.headers.iter() {
        let value = std::str::from_utf8(header.value).map_err(|_| BadRequest::Malformed)?.trim();
        match header.name.to_ascii_lowercase().as_str() {
            "host" if request.host.is_some() => return Err(BadRequest::Malformed),
            "host" => request.host = Some(value.to_ascii_lowercase()),
            "authorization" => request.authorization = Some(value.into()),
            "cookie" => request.cookies.extend(cookies(value)),
            "sec-fetch-site" => request.fetch_site = Some(value.to_ascii_lowercase()),
            "connection" => {
                request.closes |= value.to_ascii_lowercase().split(',').any(|word| word.trim() == "close")
            }
            "content-length" if value != "0" => return Err(BadRequest::HasBody),
            "transfer-encoding" => return Err(BadRequest::HasBody),
            _ => {}
        }
    }
    Ok(Some((request, len)))
}

fn cookies(value: &str) -> impl Iterator<Item = (String, String)> {
    value.split(';').filter_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    })
}

fn parameters(query: &str) -> Vec<(String, String)> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .filter_map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let form = |text: &str| decoded(&text.replace('+', " "));
            Some((form(name)?, form(value)?))
        })
        .collect()
}

/// Text with `%` and two digits for a byte. `None`: it is not valid.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Request {
        parse(text.as_bytes()).unwrap().unwrap().0
    }

    #[test]
    fn a_request_has_its_parts() {
        let request = parsed(
            "GET /api/runs/0/series?keys=rewards%2Fmean,loss&x=a+b&flag HTTP/1.1\r\nHost: LocalHost:80\r\n\
             Cookie: a=1; lockstep-80=xyz\r\nAuthorization: Bearer t\r\nConnection: keep-alive, Close\r\n\r\n",
        );
        assert_eq!((request.method.as_str(), request.path.as_str()), ("GET", "/api/runs/0/series"));
        assert_eq!(request.parameter("keys"), Some("rewards/mean,loss"));
        assert_eq!((request.parameter("x"), request.parameter("flag")), (Some("a b"), Some("")));
        assert_eq!(request.host.as_deref(), Some("localhost:80"));
        assert_eq!(request.cookies[1], ("lockstep-80".into(), "xyz".into()));
        assert!(request.closes && request.authorization.is_some());
        assert!(parsed("GET / HTTP/1.0\r\n\r\n").closes);
    }

    #[test]
    fn bad_requests_are_refused() {
        let bad = |text: &str| parse(text.as_bytes()).unwrap_err();
        assert_eq!(bad("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), BadRequest::Malformed);
        assert_eq!(bad("GET http://evil/ HTTP/1.1\r\n\r\n"), BadRequest::Malformed);
        assert_eq!(bad("GET /%zz HTTP/1.1\r\n\r\n"), BadRequest::Malformed);
        assert_eq!(bad("GET /%ff HTTP/1.1\r\n\r\n"), BadRequest::Malformed);
        assert_eq!(bad("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"), BadRequest::HasBody);
        assert_eq!(bad("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), BadRequest::HasBody);
        let many: String = (0..100).map(|i| format!("A{i}: b\r\n")).collect();
        assert_eq!(bad(&format!("GET / HTTP/1.1\r\n{many}\r\n")), BadRequest::TooLarge);
        assert!(parse(b"GET / HTTP/1.1\r\nHost").unwrap().is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), path in "\\PC{0,40}") {
            let _ = parse(&bytes);
            let _ = parse(format!("GET /{path}?{path}={path} HTTP/1.1\r\n\r\n").as_bytes());
        }
    }
}
