//! The access token. It is never printed.

use std::fmt;

use zeroize::Zeroizing;

/// A Hub access token. `Debug` does not show it, and it is overwritten in memory when it is dropped.
#[derive(Clone)]
pub struct HubToken(Zeroizing<String>);

impl HubToken {
    /// The token in `text`, without surrounding white space. `None` if nothing is left, or if the text cannot be sent
    /// in a header.
    pub fn new(text: &str) -> Option<HubToken> {
        let text = text.trim();
        let is_sendable = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        is_sendable.then(|| HubToken(Zeroizing::new(text.to_owned())))
    }

    /// The value of the `Authorization` header.
    pub(crate) fn header(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("Bearer {}", *self.0))
    }
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HubToken([hidden])")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_trimmed_and_hidden() {
        let token = HubToken::new(" hf_abc\r\n").unwrap();
        assert_eq!(*token.header(), "Bearer hf_abc");
        assert_eq!(format!("{token:?}"), "HubToken([hidden])");
        for text in ["", " \n", "hf a", "hf\nX-Evil: 1", "hf_é"] {
            assert!(HubToken::new(text).is_none(), "{text:?}");
        }
    }
}
