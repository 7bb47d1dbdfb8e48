//! Responses, and how they are written.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The most time to write a response.
const WRITE_TIME: Duration = Duration::from_secs(60);
/// The most time in which a reader takes nothing.
const STALL_TIME: Duration = Duration::from_secs(10);
const CHUNK_BYTES: usize = 64 * 1024;

/// The headers of every response: scripts, styles and data come from here only, and nobody may embed the page.
const HEADERS: &str = "\
Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
base-uri 'none'; form-action 'self'; frame-ancestors 'none'\r
X-Content-Type-Options: nosniff\r
X-Frame-Options: DENY\r
Referrer-Policy: no-referrer\r
Cross-Origin-Opener-Policy: same-origin\r
Cross-Origin-Resource-Policy: same-origin\r
Permissions-Policy: camera=(), microphone=(), geolocation=()\r
";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) body: Vec<u8>,
    /// Further headers, with their line ends.
    pub(crate) headers: String,
}

impl Response {
    pub(crate) fn new(status: u16, kind: &'static str, body: impl Into<Vec<u8>>) -> Response {
        // Metrics change, and pages of protected runs must not lie in a cache.
        Response { status, kind, body: body.into(), headers: "Cache-Control: no-store\r\n".into() }
    }

    pub(crate) fn json(body: impl Into<Vec<u8>>) -> Response {
        Response::new(200, "application/json", body)
    }

    pub(crate) fn text(status: u16, text: &str) -> Response {
        Response::new(status, "text/plain; charset=utf-8", format!("{text}\n"))
    }

    /// An error, as JSON for scripts.
    pub(crate) fn error(status: u16, message: &str) -> Response {
        let body = serde_json::json!({ "error": message }).to_string();
        Response::new(status, "application/json", body)
    }

    pub(crate) fn with_header(mut self, name: &str, value: &str) -> Response {
        debug_assert!(!value.contains(['\r', '\n']));
        self.headers.push_str(&format!("{name}: {value}\r\n"));
        self
    }

    /// Writes the response; without its body for a HEAD request.
    pub(crate) fn write(&self, stream: &mut TcpStream, head_only: bool, closes: bool) -> io::Result<()> {
        let connection = if closes { "close" } else { "keep-alive" };
        let head = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: {connection}\r\n{HEADERS}{}\r\n",
            self.status,
            reason(self.status),
            self.kind,
            self.body.len(),
            self.headers,
        );
        let deadline = Instant::now() + WRITE_TIME;
        // One packet for a small response.
        let mut bytes = head.into_bytes();
        if !head_only {
            bytes.extend_from_slice(&self.body);
        }
        stream.set_write_timeout(Some(STALL_TIME))?;
        let mut left = bytes.as_slice();
        // Not `write_all`: a reader that takes a byte now and then would keep it busy for as long as it likes.
        while !left.is_empty() {
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match stream.write(&left[..left.len().min(CHUNK_BYTES)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => left = &left[len..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        stream.flush()
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        303 => "See Other",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        _ => "Other",
    }
}
