//! The access token of an HTTP endpoint. It is never printed.

use std::fmt;

use zeroize::Zeroizing;

/// A bearer token. `Debug` does not show it, and it is overwritten in memory when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct RewardToken(Zeroizing<String>);

impl RewardToken {
    /// The token in `text`, without surrounding white space. `None` if nothing is left, or if the text cannot be sent
    /// in a header.
    pub fn new(text: &str) -> Option<RewardToken> {
        let text = text.trim();
        let is_sendable = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        is_sendable.then(|| RewardToken(Zeroizing::new(text.to_owned())))
    }

    /// The value of the `Authorization` header.
    pub(crate) fn header(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("Bearer {}", *self.0))
    }

    /// `text` without the token, for texts of the server, which may repeat it.
    pub(crate) fn redact(&self, text: &str) -> String {
        text.replace(self.0.as_str(), "[hidden]")
    }
}

impl fmt::Debug for RewardToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RewardToken([hidden])")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_trimmed_and_hidden() {
        let token = RewardToken::new(" abc\n").unwrap();
        assert_eq!(*token.header(), "Bearer abc");
        assert_eq!(format!("{token:?}"), "RewardToken([hidden])");
        assert_eq!(token.redact("bad token abc"), "bad token [hidden]");
        for text in ["", " \n", "a b", "a\nX-Evil: 1", "é"] {
            assert!(RewardToken::new(text).is_none(), "{text:?}");
        }
    }
}
