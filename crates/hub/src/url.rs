//! The part of URLs that the client needs: origins, redirects and percent encoding.

use std::fmt;

/// An `http` or `https` URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Url {
    https: bool,
    /// Host and, if given, port; in lower case.
    authority: String,
    /// Begins with a slash.
    path: String,
    /// May contain a signature, so it is never printed.
    query: String,
}

impl Url {
    /// `None` if `text` is not an absolute URL, or contains a user name, white space or control characters.
    pub(crate) fn parse(text: &str) -> Option<Url> {
        let (scheme, rest) = text.split_once("://")?;
        let https = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let text = rest.split('#').next()?;
        let end = text.find(['/', '?']).unwrap_or(text.len());
        let (authority, rest) = text.split_at(end);
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let is_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':' | '[' | ']' | '_');
        let is_clean = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
        if authority.is_empty() || !authority.chars().all(is_host) || !is_clean(path) || !is_clean(query) {
            return None;
        }
        Some(Url {
            https,
            authority: authority.to_ascii_lowercase(),
            path: if path.is_empty() { "/".into() } else { path.into() },
            query: query.into(),
        })
    }

    /// The target of a redirect from this URL.
    pub(crate) fn join(&self, location: &str) -> Option<Url> {
        if location.contains("://") {
            return Url::parse(location);
        }
        if let Some(rest) = location.strip_prefix("//") {
            return Url::parse(&format!("{}://{rest}", self.scheme()));
        }
        let base = format!("{}://{}", self.scheme(), self.authority);
        if location.starts_with('/') {
            return Url::parse(&format!("{base}{location}"));
        }
        let folder = self.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        Url::parse(&format!("{base}{folder}/{location}"))
    }

    /// Whether both have the same scheme, host and port.
    pub(crate) fn same_origin(&self, other: &Url) -> bool {
        self.https == other.https && self.host_and_port() == other.host_and_port()
    }

    pub(crate) fn is_https(&self) -> bool {
        self.https
    }

    /// Whether this is the machine itself.
    pub(crate) fn is_loopback(&self) -> bool {
        let (host, _) = self.host_and_port();
        host == "localhost" || host == "[::1]" || host.starts_with("127.")
    }

    /// Scheme and host, for messages.
    pub(crate) fn origin(&self) -> String {
        format!("{}://{}", self.scheme(), self.authority)
    }

    /// The complete URL, for requests only.
    pub(crate) fn request_text(&self) -> String {
        let mark = if self.query.is_empty() { "" } else { "?" };
        format!("{self}{mark}{}", self.query)
    }

    fn scheme(&self) -> &'static str {
        if self.https { "https" } else { "http" }
    }

    fn host_and_port(&self) -> (&str, u16) {
        let default = if self.https { 443 } else { 80 };
        // A colon inside of brackets belongs to an IPv6 address.
        match self.authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, port.parse().unwrap_or(default)),
            _ => (&self.authority, default),
        }
    }
}

/// Without the query.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = if self.path == "/" { "" } else { &self.path };
        write!(f, "{}{path}", self.origin())
    }
}

/// Encodes a path. Slashes stay.
pub(crate) fn encode_path(path: &str) -> String {
    path.split('/').map(encode).collect::<Vec<_>>().join("/")
}

/// Encodes one segment of a path. Slashes are encoded, too.
pub(crate) fn encode(segment: &str) -> String {
    let mut encoded = String::with_capacity(segment.len());
    for byte in segment.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn origins_are_compared_with_their_default_ports() {
        let hub = url("https://Hub.example/a");
        assert!(hub.same_origin(&url("https://hub.example:443/b?x")));
        for other in
            ["http://hub.example/", "https://hub.example:444/", "https://hub.example.evil/", "https://a/"]
        {
            assert!(!hub.same_origin(&url(other)), "{other}");
        }
        assert!(url("http://[::1]:80/").same_origin(&url("http://[::1]/")));
    }

    #[test]
    fn redirects_are_joined() {
        let base = url("https://hub.example/a/b?c=d");
        assert_eq!(base.join("/x/y?z=1").unwrap().request_text(), "https://hub.example/x/y?z=1");
        assert_eq!(base.join("y").unwrap().request_text(), "https://hub.example/a/y");
        assert_eq!(base.join("//cdn.example/x").unwrap().request_text(), "https://cdn.example/x");
        assert_eq!(base.join("http://cdn.example").unwrap().request_text(), "http://cdn.example");
        for bad in
            ["ftp://x/y", "file:///etc/passwd", "https://", "https://a@b/", "https://a b/", "/x\r\nY: z"]
        {
            assert_eq!(base.join(bad), None, "{bad}");
        }
    }

    #[test]
    fn queries_are_not_displayed() {
        assert_eq!(url("https://a.b/c?signature=x#y").to_string(), "https://a.b/c");
        assert_eq!(url("https://a.b").to_string(), "https://a.b");
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encode_path("a b/ü#?.json"), "a%20b/%C3%BC%23%3F.json");
        assert_eq!(encode("refs/pr/1"), "refs%2Fpr%2F1");
    }
}
