//! Who may read: the token, and the name under which the server was reached.
//!
//! A page of another site cannot read ours, but it can make its own name lead to this machine (DNS rebinding) and so be
//! taken for ours. Requests under a name that is not this machine's are refused. Addresses are no names, and a program
//! that has the token is no page of another site.

use std::net::IpAddr;

use lockstep_core::proof::{PROOF_BYTES, Secret};

use crate::request::Request;
use crate::response::Response;
use crate::token::Token;

/// What a cookie proves. It is not the token: a stolen cookie is of no use elsewhere.
const COOKIE_LABEL: &str = "dashboard cookie";
const TOKEN_LABEL: &str = "dashboard token";
/// A week.
const COOKIE_SECONDS: u32 = 7 * 24 * 3600;

/// Who may read.
pub(crate) struct Access {
    secret: Option<Secret>,
    cookie: String,
    hosts: Vec<String>,
}

impl Access {
    pub(crate) fn new(token: Option<&Token>, port: u16, hosts: Vec<String>) -> Access {
        let hosts = hosts.into_iter().map(|host| host.trim().to_ascii_lowercase());
        Access {
            secret: token.map(Token::secret),
            // Cookies do not distinguish ports, and there may be several dashboards on a machine.
            cookie: format!("lockstep-{port}"),
            hosts: hosts.filter(|host| !host.is_empty()).collect(),
        }
    }

    /// `Err`: the answer to a request that is not allowed, or that brings the token and is sent on without it.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Response> {
        if self.has_bearer_token(request) {
            return Ok(());
        }
        if !self.is_own_host(request.host.as_deref()) {
            let text =
                "this name is not known to be one of this machine's: add it to LOCKSTEP_DASHBOARD_HOSTS";
            return Err(Response::text(421, text));
        }
        // `none`: typed by the user. A link from elsewhere may open the page, but no script there may ask for data.
        let is_foreign = matches!(request.fetch_site.as_deref(), Some("cross-site" | "same-site"));
        if is_foreign && request.path != "/" {
            return Err(Response::text(403, "requests of other sites are refused"));
        }
        let Some(secret) = &self.secret else { return Ok(()) };
        if let Some(token) = request.parameter("token").filter(|_| request.path == "/") {
            return Err(match is_token(secret, token) {
                true => self.with_cookie(secret),
                false => login_page("This token is wrong."),
            });
        }
        let cookies = request.cookies.iter().filter(|(name, _)| *name == self.cookie);
        if cookies.filter_map(|(_, value)| from_hex(value)).any(|tag| secret.verify(COOKIE_LABEL, &[], &tag))
        {
            return Ok(());
        }
        Err(match request.path.as_str() {
            "/" => login_page("This dashboard is protected."),
            _ => Response::error(401, "the token of the dashboard is missing or wrong")
                .with_header("WWW-Authenticate", "Bearer"),
        })
    }

    fn has_bearer_token(&self, request: &Request) -> bool {
        let Some((scheme, token)) = request.authorization.as_deref().and_then(|text| text.split_once(' '))
        else {
            return false;
        };
        let matches = |secret| is_token(secret, token.trim());
        scheme.eq_ignore_ascii_case("bearer") && self.secret.as_ref().is_some_and(matches)
    }

    /// Gives the browser a cookie, and sends it to the page: the token stays in no history.
    fn with_cookie(&self, secret: &Secret) -> Response {
        let tag: String = secret.tag(COOKIE_LABEL, &[]).iter().map(|byte| format!("{byte:02x}")).collect();
        let cookie =
            format!("{}={tag}; HttpOnly; SameSite=Lax; Path=/; Max-Age={COOKIE_SECONDS}", self.cookie);
        Response::new(303, "text/plain", "").with_header("Location", "/").with_header("Set-Cookie", &cookie)
    }

    fn is_own_host(&self, host: Option<&str>) -> bool {
        // Every browser sends one.
        let Some(host) = host else { return false };
        let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, _)) => address,
            None => host.split_once(':').map_or(host, |(name, _)| name),
        };
        let name = name.trim_end_matches('.');
        name == "localhost" || name.parse::<IpAddr>().is_ok() || self.hosts.iter().any(|own| own == name)
    }
}

/// Compares in constant time, whatever the lengths.
fn is_token(secret: &Secret, token: &str) -> bool {
    secret.verify(TOKEN_LABEL, &[], &Secret::from_text(token).tag(TOKEN_LABEL, &[]))
}

fn from_hex(text: &str) -> Option<[u8; PROOF_BYTES]> {
    let mut bytes = [0; PROOF_BYTES];
    if text.len() != 2 * PROOF_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, i) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(i..i + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// A page that asks for the token. `why` is a sentence of ours.
fn login_page(why: &str) -> Response {
    let page = include_str!("assets/login.html").replace("{why}", why);
    Response::new(401, "text/html; charset=utf-8", page)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn access() -> Access {
        Access::new(Some(&Token::new(TOKEN, "test").unwrap()), 80, vec!["Box ".into(), String::new()])
    }

    fn request(path: &str) -> Request {
        Request { path: path.into(), host: Some("127.0.0.1:80".into()), ..Request::default() }
    }

    fn status(access: &Access, request: &Request) -> u16 {
        access.check(request).map_or_else(|response| response.status, |()| 200)
    }

    #[test]
    fn without_a_token_only_names_of_this_machine_count() {
        let access = Access::new(None, 80, vec!["box".into()]);
        let of = |host: &str| status(&access, &Request { host: Some(host.into()), ..request("/") });
        for host in ["localhost", "localhost:9", "127.0.0.1", "[::1]:80", "10.1.2.3:80", "box", "box.:80"] {
            assert_eq!(of(host), 200, "{host}");
        }
        for host in
            ["", "evil.example", "localhost.evil.example", "box.evil", "127.0.0.1.evil", "[evil]", ":80"]
        {
            assert_eq!(of(host), 421, "{host}");
        }
        assert_eq!(status(&access, &Request { host: None, ..request("/") }), 421);
    }

    #[test]
    fn the_token_becomes_a_cookie() {
        let access = access();
        assert_eq!(status(&access, &request("/")), 401);
        assert_eq!(status(&access, &request("/api/runs")), 401);
        let with = |token: &str| Request { query: vec![("token".into(), token.into())], ..request("/") };
        assert_eq!(status(&access, &with("0123456789abcdeF")), 401);
        let redirect = access.check(&with(TOKEN)).unwrap_err();
        assert_eq!(redirect.status, 303);
        assert!(redirect.headers.contains("Location: /\r\n") && !redirect.headers.contains(TOKEN));
        let (_, rest) = redirect.headers.split_once("Set-Cookie: lockstep-80=").unwrap();
        let (value, rest) = rest.split_once(';').unwrap();
        assert!(rest.contains("HttpOnly") && rest.contains("SameSite"), "{rest}");
        let cookie = |value: &str| Request {
            cookies: vec![("lockstep-80".into(), value.into())],
            ..request("/api/runs")
        };
        assert_eq!(status(&access, &cookie(value)), 200);
        assert_eq!(status(&access, &cookie(&value.replace(&value[..1], "x"))), 401);
        assert_eq!(status(&access, &cookie(TOKEN)), 401);
        assert_eq!(status(&access, &cookie("é".repeat(32).as_str())), 401);
        // The token counts in the address of the page only, so that no link to data contains it.
        let link = Request { query: vec![("token".into(), TOKEN.into())], ..request("/api/runs") };
        assert_eq!(status(&access, &link), 401);
    }

    #[test]
    fn programs_send_the_token_as_a_header() {
        let access = access();
        let with = |text: &str| Request {
            authorization: Some(text.into()),
            host: Some("service.cluster:80".into()),
            ..request("/metrics")
        };
        assert_eq!(status(&access, &with(&format!("Bearer {TOKEN}"))), 200);
        assert_eq!(status(&access, &with(&format!("bearer {TOKEN} "))), 200);
        for text in ["Bearer ", "Bearer 0123456789abcde", &format!("Basic {TOKEN}"), TOKEN] {
            assert_eq!(status(&access, &with(text)), 421, "{text}");
        }
    }

    #[test]
    fn scripts_of_other_sites_are_refused() {
        let access = Access::new(None, 80, vec![]);
        let from = |site: &str, path| Request { fetch_site: Some(site.into()), ..request(path) };
        assert_eq!(status(&access, &from("cross-site", "/api/runs")), 403);
        assert_eq!(status(&access, &from("cross-site", "/")), 200);
        assert_eq!(status(&access, &from("same-origin", "/api/runs")), 200);
        assert_eq!(status(&access, &from("none", "/api/runs")), 200);
    }
}
