//! Requests: one attempt each, redirects included. Callers retry.
//!
//! Redirects are followed here and not by the HTTP library, because the token may only go to the endpoint's own host,
//! and because the Hub puts a file's hash and size on the answer that redirects to the storage host.

use std::io::Read as _;
use std::time::Duration;

use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::digest::clean_etag;
use crate::error::HubError;
use crate::repo::Repo;
use crate::retry::{Failed, Transient};
use crate::settings::HubSettings;
use crate::token::HubToken;
use crate::url::Url;

const MAX_REDIRECTS: usize = 5;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const USER_AGENT: &str = concat!("lockstep/", env!("CARGO_PKG_VERSION"));
/// Longer messages of a server are cut.
const MAX_MESSAGE_CHARS: usize = 300;
/// A bundle of all public root certificates has about 0.25 MiB.
const MAX_CERTIFICATES_BYTES: u64 = 8 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Head,
}

/// What is requested, for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'a> {
    pub(crate) repo: &'a Repo,
    pub(crate) revision: &'a str,
    pub(crate) file: Option<&'a str>,
}

/// A successful answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Body,
    /// Where `Content-Range` begins.
    pub(crate) range_start: Option<u64>,
    /// The ETag of the file itself, not of the storage host's copy.
    pub(crate) etag: Option<String>,
    /// The size of the whole file, if the endpoint names it.
    pub(crate) linked_size: Option<u64>,
    /// The host that answered.
    pub(crate) origin: String,
}

pub(crate) struct Http {
    agent: Agent,
    endpoint: Url,
    token: Option<HubToken>,
}

impl Http {
    pub(crate) fn new(settings: &HubSettings) -> Result<Http, HubError> {
        let roots = match &settings.certificates {
            None => RootCerts::WebPki,
            Some(path) => read_certificates(path)?,
        };
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(USER_AGENT)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(settings.retry.stall))
            .timeout_per_read(Some(settings.retry.stall))
            .timeout_per_write(Some(settings.retry.stall))
            .tls_config(TlsConfig::builder().root_certs(roots).build());
        // A server on this machine is not behind the proxy.
        if settings.endpoint.is_loopback() {
            config = config.proxy(None);
        }
        Ok(Http {
            agent: config.build().into(),
            endpoint: settings.endpoint.clone(),
            token: settings.token.clone(),
        })
    }

    pub(crate) fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// A URL below the endpoint. `path` is encoded and begins with a slash.
    pub(crate) fn url(&self, path: &str) -> Result<Url, HubError> {
        let text = format!("{}{path}", self.endpoint);
        Url::parse(&text).ok_or(HubError::BadEndpoint { value: self.endpoint.to_string() })
    }

    /// Sends a request and follows redirects. A HEAD request stops at a redirect that already names the file's hash and
    /// size: the signature of a storage host's URL may be for GET requests only. `range` is the first byte to send.
    pub(crate) fn send(
        &self,
        method: Method,
        url: &Url,
        range: Option<u64>,
        subject: Subject<'_>,
    ) -> Result<Answer, Failed> {
        let mut url = url.clone();
        let (mut linked_etag, mut linked_size) = (None, None);
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send_once(method, &url, range)?;
            let status = response.status().as_u16();
            let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            linked_etag = linked_etag.or_else(|| header("x-linked-etag").map(|e| clean_etag(e).to_owned()));
            linked_size = linked_size.or_else(|| header("x-linked-size")?.trim().parse().ok());
            let is_redirect = matches!(status, 301 | 302 | 303 | 307 | 308);
            let knows_file = method == Method::Head && linked_etag.is_some() && linked_size.is_some();
            if is_redirect && !knows_file {
                url = self.redirect(&url, header("location"))?;
                continue;
            }
            if !is_redirect && !(200..300).contains(&status) {
                return Err(self.refusal(status, &header, &url, subject));
            }
            return Ok(Answer {
                status,
                range_start: header("content-range").and_then(range_start),
                etag: linked_etag.or_else(|| header("etag").map(|e| clean_etag(e).to_owned())),
                linked_size,
                origin: url.origin(),
                body: response.into_body(),
            });
        }
        Err(HubError::TooManyRedirects { origin: self.endpoint.origin(), limit: MAX_REDIRECTS }.into())
    }

    /// Reads an answer that must not have more than `limit` bytes.
    pub(crate) fn read_limited(&self, answer: Answer, limit: u64) -> Result<Vec<u8>, Failed> {
        let origin = answer.origin;
        let too_large = || HubError::BadAnswer {
            origin: origin.clone(),
            why: format!("it is larger than {}", lockstep_core::Bytes(limit)),
        };
        if answer.body.content_length().is_some_and(|length| length > limit) {
            return Err(too_large().into());
        }
        let mut bytes = Vec::new();
        let reader = answer.body.into_with_config().limit(u64::MAX).reader();
        match reader.take(limit + 1).read_to_end(&mut bytes) {
            Ok(_) if bytes.len() as u64 > limit => Err(too_large().into()),
            Ok(_) => Ok(bytes),
            Err(cause) => Err(cut(&origin, &cause)),
        }
    }

    fn send_once(
        &self,
        method: Method,
        url: &Url,
        range: Option<u64>,
    ) -> Result<ureq::http::Response<Body>, Failed> {
        let text = url.request_text();
        let mut request = match method {
            Method::Get => self.agent.get(&text),
            Method::Head => self.agent.head(&text),
        };
        // Sizes and ranges count the bytes of the file, not of a compressed form.
        request = request.header("Accept-Encoding", "identity");
        if let Some(start) = range {
            request = request.header("Range", format!("bytes={start}-"));
        }
        if let Some(token) = self.token.as_ref().filter(|_| url.same_origin(&self.endpoint)) {
            request = request.header("Authorization", token.header().as_str());
        }
        request.call().map_err(|error| transport_failure(url, error))
    }

    /// The next URL. A redirect from https to http would expose what is sent and accept what anyone sends back.
    fn redirect(&self, from: &Url, location: Option<&str>) -> Result<Url, HubError> {
        let origin = from.origin();
        let Some(location) = location else {
            return Err(HubError::BadAnswer { origin, why: "a redirect without a target".into() });
        };
        let Some(target) = from.join(location) else {
            let target = printable(location.split('?').next().unwrap_or_default());
            return Err(HubError::BadRedirect {
                origin,
                target,
                why: "this is not an http or https address",
            });
        };
        if from.is_https() && !target.is_https() {
            let why = "the connection would no longer be encrypted";
            return Err(HubError::BadRedirect { origin, target: target.origin(), why });
        }
        Ok(target)
    }

    /// The error for a status that is neither success nor redirect.
    fn refusal<'h>(
        &self,
        status: u16,
        header: &dyn Fn(&str) -> Option<&'h str>,
        url: &Url,
        subject: Subject<'_>,
    ) -> Failed {
        let message = printable(header("x-error-message").unwrap_or_default());
        let from_endpoint = url.same_origin(&self.endpoint);
        if matches!(status, 408 | 429 | 500 | 502 | 503 | 504) {
            let retry_after = header("retry-after").and_then(|text| text.trim().parse().ok());
            return Failed::Transient(Box::new(Transient {
                error: HubError::Status { origin: url.origin(), status, message },
                retry_after: retry_after.map(Duration::from_secs),
            }));
        }
        if status == 416 {
            // The requested range is beyond the end of the file. The caller starts anew.
            return HubError::Status { origin: url.origin(), status, message }.into();
        }
        if !from_endpoint {
            // Signed URLs of storage hosts expire. A new request to the endpoint gets a new one.
            let error = HubError::Status { origin: url.origin(), status, message };
            return Failed::Transient(Box::new(Transient { error, retry_after: None }));
        }
        let (repo, had_token) = (subject.repo.clone(), self.token.is_some());
        let endpoint = self.endpoint.to_string();
        let missing = |repo| HubError::RepoMissing { repo, endpoint: endpoint.clone(), had_token };
        Failed::Permanent(match (status, header("x-error-code").unwrap_or_default()) {
            (401 | 403, "GatedRepo") => {
                let page = repo.page(&endpoint);
                HubError::Gated { repo, page, had_token }
            }
            (_, "RepoNotFound") => missing(repo),
            (_, "RevisionNotFound") => HubError::RevisionMissing { repo, revision: subject.revision.into() },
            // Without a token, the Hub also answers 401 for repositories that do not exist.
            (401, _) if had_token => HubError::TokenRejected { repo, status },
            (401, _) => missing(repo),
            (403, _) => HubError::Forbidden { repo, message, had_token },
            (404, _) => match subject.file {
                Some(file) => {
                    HubError::FileMissing { repo, file: file.into(), revision: subject.revision.into() }
                }
                None => missing(repo),
            },
            _ => HubError::Status { origin: url.origin(), status, message },
        })
    }
}

/// The failure of a connection that broke while its answer was read.
pub(crate) fn cut(origin: &str, cause: &std::io::Error) -> Failed {
    let cause = match cause.kind() {
        std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => "no data came for too long".into(),
        _ => format!("the connection broke ({cause})"),
    };
    Failed::Transient(Box::new(Transient {
        error: HubError::Network { origin: origin.into(), cause },
        retry_after: None,
    }))
}

fn transport_failure(url: &Url, error: ureq::Error) -> Failed {
    let cause = match error {
        ureq::Error::HostNotFound => "the host name cannot be resolved".into(),
        ureq::Error::Timeout(_) => "no answer in time".into(),
        ureq::Error::Io(cause) => cause.to_string(),
        // A certificate does not become valid by trying again.
        ureq::Error::Rustls(cause) => {
            let cause = format!("no secure connection: {cause}");
            return HubError::Network { origin: url.origin(), cause }.into();
        }
        other => other.to_string(),
    };
    Failed::Transient(Box::new(Transient {
        error: HubError::Network { origin: url.origin(), cause },
        retry_after: None,
    }))
}

/// `bytes 100-199/200` begins at 100.
fn range_start(text: &str) -> Option<u64> {
    text.trim().strip_prefix("bytes")?.trim_start().split('-').next()?.parse().ok()
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect()
}

fn read_certificates(path: &std::path::Path) -> Result<RootCerts, HubError> {
    let bad = |why: String| HubError::BadCertificates { path: path.into(), why };
    let file = std::fs::File::open(path).map_err(|e| bad(e.to_string()))?;
    let mut pem = Vec::new();
    file.take(MAX_CERTIFICATES_BYTES).read_to_end(&mut pem).map_err(|e| bad(e.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| bad(e.to_string()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(bad("it contains no certificate".into()));
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_begin() {
        assert_eq!(range_start("bytes 100-199/200"), Some(100));
        assert_eq!(range_start("bytes */200"), None);
        assert_eq!(range_start("lines 1-2/3"), None);
    }

    #[test]
    fn messages_are_printable() {
        assert_eq!(printable("a\r\n\u{1b}[31mb"), "a[31mb");
        assert_eq!(printable(&"x".repeat(1000)).len(), MAX_MESSAGE_CHARS);
    }
}
