//! What the client needs to know, and the environment variables that set it. They are those of `huggingface_hub`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::error::HubError;
use crate::retry::RetryPolicy;
use crate::token::HubToken;
use crate::url::Url;

pub(crate) const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const MAX_TOKEN_FILE_BYTES: u64 = 4096;

/// Reads an environment variable.
type Get<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Where Hugging Face libraries keep their files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubHome {
    /// The download cache: `HF_HUB_CACHE`, or `$HF_HOME/hub`.
    pub hub: PathBuf,
    /// The data sets that the `datasets` library has prepared: `HF_DATASETS_CACHE`, or `$HF_HOME/datasets`.
    pub datasets: PathBuf,
    /// The file of the token: `HF_TOKEN_PATH`, or `$HF_HOME/token`.
    pub token_file: PathBuf,
}

impl HubHome {
    pub fn from_env(get: Get<'_>) -> HubHome {
        let folder = |name: &str| {
            let path = get(name).filter(|path| !path.is_empty()).map(PathBuf::from)?;
            Some(match path.strip_prefix("~") {
                Ok(rest) => PathBuf::from(get("HOME").unwrap_or_default()).join(rest),
                Err(_) => path,
            })
        };
        let user_cache = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        let home = folder("HF_HOME")
            .or_else(|| Some(user_cache()?.join("huggingface")))
            .unwrap_or_else(|| PathBuf::from("huggingface"));
        HubHome {
            hub: folder("HF_HUB_CACHE")
                .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| home.join("hub")),
            datasets: folder("HF_DATASETS_CACHE").unwrap_or_else(|| home.join("datasets")),
            token_file: folder("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token")),
        }
    }
}

/// Upper limits for what a server may send.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The size of a JSON answer.
    pub json_bytes: u64,
    /// The number of files of a repository. The Hub cuts longer lists.
    pub num_files: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { json_bytes: 64 << 20, num_files: 50_000 }
    }
}

/// How to reach the Hub, and where to put what it sends.
#[derive(Clone, Debug)]
pub struct HubSettings {
    pub(crate) endpoint: Url,
    pub home: HubHome,
    pub token: Option<HubToken>,
    /// Nothing is requested.
    pub offline: bool,
    /// A PEM file with the certificates to trust, instead of the built-in ones.
    pub certificates: Option<PathBuf>,
    pub retry: RetryPolicy,
    pub limits: Limits,
}

impl HubSettings {
    /// Reads the variables through `get`, and the token file.
    pub fn from_env(get: Get<'_>) -> Result<HubSettings, HubError> {
        let text = |name: &str| {
            get(name).map(|value| value.to_string_lossy().trim().to_owned()).filter(|value| !value.is_empty())
        };
        let is_on = |name: &str| {
            text(name).is_some_and(|value| {
                matches!(value.to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true")
            })
        };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.into());
        let home = HubHome::from_env(get);
        let token = match ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].iter().find_map(|name| text(name)) {
            Some(token) => {
                Some(HubToken::new(&token).ok_or(HubError::BadToken { source_name: "HF_TOKEN".into() })?)
            }
            None => read_token(&home.token_file)?,
        };
        let certificates = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"].iter().find_map(|name| text(name));
        Ok(HubSettings {
            endpoint: parse_endpoint(&endpoint)?,
            home,
            token: token.filter(|_| !is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN")),
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            certificates: certificates.map(PathBuf::from),
            retry: RetryPolicy::default(),
            limits: Limits::default(),
        })
    }

    /// The address of the Hub, without a slash at its end.
    pub fn endpoint(&self) -> String {
        self.endpoint.to_string()
    }
}

fn parse_endpoint(text: &str) -> Result<Url, HubError> {
    let url = Url::parse(text.trim_end_matches('/')).filter(|_| !text.contains(['?', '#']));
    url.ok_or_else(|| HubError::BadEndpoint { value: text.into() })
}

/// The token in a file. A missing or empty file is no error: public repositories need no token.
fn read_token(path: &Path) -> Result<Option<HubToken>, HubError> {
    use std::io::Read as _;
    let Ok(file) = std::fs::File::open(path) else { return Ok(None) };
    let mut text = zeroize::Zeroizing::new(String::new());
    let read = file.take(MAX_TOKEN_FILE_BYTES).read_to_string(&mut text);
    let bad = || HubError::BadToken { source_name: path.display().to_string() };
    read.map_err(|_| bad())?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    HubToken::new(&text).map(Some).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        let get =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        HubSettings::from_env(&get)
    }

    #[test]
    fn defaults() {
        let settings = read(&[("HOME", "/home/u")]).unwrap();
        assert_eq!(settings.endpoint(), "https://huggingface.co");
        assert_eq!(settings.home.hub, Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!(settings.home.datasets, Path::new("/home/u/.cache/huggingface/datasets"));
        assert_eq!(settings.home.token_file, Path::new("/home/u/.cache/huggingface/token"));
        assert!(!settings.offline && settings.token.is_none() && settings.certificates.is_none());
    }

    #[test]
    fn every_variable_is_read() {
        let settings = read(&[
            ("HOME", "/home/u"),
            ("HF_HOME", "~/hf"),
            ("HF_HUB_CACHE", "/big/hub"),
            ("HF_DATASETS_CACHE", ""),
            ("HF_ENDPOINT", "http://mirror.local:8080/hf/"),
            ("HF_TOKEN", "hf_x\n"),
            ("HF_HUB_OFFLINE", "True"),
            ("SSL_CERT_FILE", "/etc/ca.pem"),
        ])
        .unwrap();
        assert_eq!(settings.endpoint(), "http://mirror.local:8080/hf");
        assert_eq!(settings.home.hub, Path::new("/big/hub"));
        assert_eq!(settings.home.datasets, Path::new("/home/u/hf/datasets"));
        assert!(settings.offline && settings.token.is_some());
        assert!(!format!("{settings:?}").contains("hf_x"));
        let quiet = read(&[("HF_TOKEN", "hf_x"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).unwrap();
        assert!(quiet.token.is_none());
    }

    #[test]
    fn the_token_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        let token = read(&[("HF_HOME", home)]).unwrap().token.unwrap();
        assert_eq!(*token.header(), "Bearer hf_file");
        std::fs::write(dir.path().join("token"), "two words").unwrap();
        let error = read(&[("HF_HOME", home)]).unwrap_err().to_string();
        assert!(error.contains("/token") && !error.contains("two"), "{error}");
    }

    #[test]
    fn bad_endpoints_are_refused() {
        for value in ["huggingface.co", "ftp://x", "https://user:secret@x", "https://x?y"] {
            assert!(read(&[("HF_ENDPOINT", value)]).is_err(), "{value}");
        }
    }
}
