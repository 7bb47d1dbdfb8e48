//! The token without which a protected dashboard shows nothing.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use lockstep_core::proof::Secret;

use crate::error::DashboardError;

/// Shorter tokens could be guessed.
const LEAST_CHARS: usize = 16;
const MOST_BYTES: u64 = 4096;

/// The secret that opens the page. Never printed, except as a part of the address that the user opens.
#[derive(Clone)]
pub struct Token {
    text: String,
    is_new: bool,
}

impl Token {
    /// Checks a token; `origin` names where it is from.
    pub fn new(text: &str, origin: &str) -> Result<Token, DashboardError> {
        let text = text.trim();
        let chars = text.chars().count();
        if chars < LEAST_CHARS {
            return Err(DashboardError::TokenShort { origin: origin.into(), chars, least: LEAST_CHARS });
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(DashboardError::TokenCharacters { origin: origin.into() });
        }
        Ok(Token { text: text.into(), is_new: false })
    }

    /// Reads a file that only its owner can read.
    pub fn from_file(path: &Path) -> Result<Token, DashboardError> {
        let failed = |source| DashboardError::TokenUnreadable { path: path.into(), source };
        let file = std::fs::File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(DashboardError::TokenFileOpen { path: path.into(), mode });
        }
        let mut text = String::new();
        file.take(MOST_BYTES).read_to_string(&mut text).map_err(failed)?;
        Token::new(&text, &path.display().to_string())
    }

    /// A new random token.
    pub fn random() -> Result<Token, DashboardError> {
        let mut bytes = [0; 24];
        getrandom::fill(&mut bytes).map_err(|cause| DashboardError::System {
            what: "getting random bytes from the system",
            source: std::io::Error::other(cause.to_string()),
        })?;
        Ok(Token { text: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), is_new: true })
    }

    pub(crate) fn secret(&self) -> Secret {
        Secret::from_text(&self.text)
    }

    /// The text of a token that nobody else has yet: the user must be given it.
    pub(crate) fn new_text(&self) -> Option<&str> {
        self.is_new.then_some(self.text.as_str())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_checked_and_never_shown() {
        let token = Token::new(" 0123456789abcdef\n", "X").unwrap();
        assert_eq!((format!("{token:?}").as_str(), token.new_text()), ("Token(..)", None));
        let random = Token::random().unwrap();
        assert_eq!(random.new_text().unwrap().len(), 48);
        let error = Token::new("hunter2", "LOCKSTEP_DASHBOARD_TOKEN").unwrap_err().to_string();
        assert_eq!(error, "the token in LOCKSTEP_DASHBOARD_TOKEN has 7 characters; at least 16 are required");
        let error = Token::new("0123456789 abcdef", "X").unwrap_err().to_string();
        assert!(!error.contains("0123"), "{error}");
    }

    #[test]
    fn a_token_file_must_be_readable_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let with = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Token::from_file(&path)
        };
        assert!(with(0o600).is_ok());
        assert!(matches!(with(0o644), Err(DashboardError::TokenFileOpen { mode: 0o644, .. })));
        assert!(matches!(
            Token::from_file(&dir.path().join("none")),
            Err(DashboardError::TokenUnreadable { .. })
        ));
    }
}
