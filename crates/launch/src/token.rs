//! The token of a run, a shared secret: any process that has it may join.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use lockstep_core::proof::Secret;

use crate::error::LaunchError;
use crate::names::{TOKEN, TOKEN_FILE};

/// The token of a run. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// Shorter tokens could be guessed.
const LEAST_CHARS: usize = 16;
const MOST_BYTES: u64 = 4096;

impl Token {
    /// Reads the token from the environment through `get`: from [`TOKEN`], or from the file named by [`TOKEN_FILE`].
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Token>, LaunchError> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        if let Some(text) = get(TOKEN) {
            return Token::checked(&text, TOKEN.into()).map(Some);
        }
        get(TOKEN_FILE).map(|path| Token::from_file(Path::new(&path))).transpose()
    }

    fn from_file(path: &Path) -> Result<Token, LaunchError> {
        use std::os::unix::fs::PermissionsExt as _;
        let failed = |cause| LaunchError::TokenUnreadable { path: path.into(), cause };
        let file = std::fs::File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(LaunchError::TokenFileOpen { path: PathBuf::from(path), mode });
        }
        let mut text = String::new();
        file.take(MOST_BYTES).read_to_string(&mut text).map_err(failed)?;
        Token::checked(&text, path.display().to_string())
    }

    fn checked(text: &str, origin: String) -> Result<Token, LaunchError> {
        let text = text.trim();
        let chars = text.chars().count();
        if chars < LEAST_CHARS {
            return Err(LaunchError::TokenShort { origin, chars, least: LEAST_CHARS });
        }
        Ok(Token(text.into()))
    }

    /// A new random token.
    pub fn random() -> Result<Token, LaunchError> {
        let bytes = nonce()?;
        Ok(Token(bytes.iter().map(|b| format!("{b:02x}")).collect()))
    }

    /// The variable that passes the token to a rank. Use it for a rank's environment only.
    pub fn variable(&self) -> (&'static str, String) {
        (TOKEN, self.0.clone())
    }

    pub(crate) fn secret(&self) -> Secret {
        Secret::from_text(&self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// 32 fresh random bytes.
pub(crate) fn nonce() -> Result<[u8; 32], LaunchError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|cause| LaunchError::System {
        what: "get random bytes from the system",
        cause: std::io::Error::other(cause.to_string()),
    })?;
    Ok(bytes)
}

/// The secret of a run without a token. It proves nothing, so the rendezvous then listens on loopback only.
pub(crate) fn no_secret() -> Secret {
    Secret::from_text("")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use insta::assert_snapshot;

    use super::*;

    const TEXT: &str = "0123456789abcdef0123456789abcdef";

    fn from_file(content: &str, mode: u32) -> Result<Token, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let value = path.display().to_string();
        Token::read(&|name| (name == TOKEN_FILE).then(|| value.clone()))
            .map(Option::unwrap)
            .map_err(|e| e.to_string().replace(dir.path().to_str().unwrap(), ""))
    }

    #[test]
    fn a_token_file_must_be_readable_by_its_owner_only() {
        assert_eq!(from_file(&format!("{TEXT}\n"), 0o600), Ok(Token(TEXT.into())));
        assert_eq!(from_file(TEXT, 0o400), Ok(Token(TEXT.into())));
        assert_snapshot!(from_file(TEXT, 0o640).unwrap_err(), @"token file /token can be read by other users (mode 0640)");
        assert_snapshot!(from_file(TEXT, 0o604).unwrap_err(), @"token file /token can be read by other users (mode 0604)");
        assert_snapshot!(from_file("short\n", 0o600).unwrap_err(), @"the token in /token has 5 characters; at least 16 are required");
    }

    #[test]
    fn the_variable_takes_precedence_over_the_file() {
        let get = |name: &str| (name == TOKEN).then(|| TEXT.to_string()).or(Some("/nowhere".into()));
        assert_eq!(Token::read(&get).unwrap(), Some(Token(TEXT.into())));
        assert_eq!(Token::read(&|_| None).unwrap(), None);
        let error = Token::read(&|name| (name == TOKEN).then(|| "hunter2".into())).unwrap_err();
        assert_snapshot!(error, @"the token in LOCKSTEP_TOKEN has 7 characters; at least 16 are required");
    }

    #[test]
    fn debug_output_does_not_show_the_token() {
        let token = Token::random().unwrap();
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_eq!(token.0.len(), 64);
        assert_ne!(token, Token::random().unwrap());
    }
}
