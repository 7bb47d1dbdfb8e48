//! The Hub's answer about a revision: its commit and its files.

use serde::Deserialize;

use crate::digest::ContentHash;
use crate::error::HubError;
use crate::repo::{Repo, file_name_problem, is_commit};

/// A file of a repository at a commit. Its name is safe to use as a path below a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    name: String,
    pub(crate) size: Option<u64>,
    pub(crate) hash: Option<ContentHash>,
}

impl RemoteFile {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size in bytes, if the server has listed it.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// A file of which only the name is known.
    pub(crate) fn named(repo: &Repo, name: &str) -> Result<RemoteFile, HubError> {
        match file_name_problem(name) {
            None => Ok(RemoteFile { name: name.into(), size: None, hash: None }),
            Some(why) => Err(HubError::UnsafeFileName {
                repo: repo.clone(),
                name: name.chars().take(200).collect(),
                why,
            }),
        }
    }
}

#[derive(Deserialize)]
struct RevisionInfo {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Reads the answer: the commit, and the files sorted by name.
pub(crate) fn parse(
    repo: &Repo,
    origin: &str,
    json: &[u8],
    max_files: usize,
) -> Result<(String, Vec<RemoteFile>), HubError> {
    let bad = |why: String| HubError::BadAnswer { origin: origin.into(), why };
    let info: RevisionInfo = serde_json::from_slice(json).map_err(|e| bad(format!("invalid JSON ({e})")))?;
    if !is_commit(&info.sha) {
        return Err(bad("it names no commit".into()));
    }
    if info.siblings.len() > max_files {
        return Err(bad(format!("it lists {} files, more than {max_files}", info.siblings.len())));
    }
    let mut files = info.siblings.into_iter().map(|s| checked(repo, s)).collect::<Result<Vec<_>, _>>()?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files.dedup_by(|a, b| a.name == b.name);
    // A name that is also a folder could not be written, or would be written through a link.
    for pair in files.windows(2) {
        if pair[1].name.strip_prefix(&pair[0].name).is_some_and(|rest| rest.starts_with('/')) {
            let name = pair[0].name.clone();
            return Err(HubError::UnsafeFileName {
                repo: repo.clone(),
                name,
                why: "it is a file and a folder at once",
            });
        }
    }
    Ok((info.sha, files))
}

fn checked(repo: &Repo, sibling: Sibling) -> Result<RemoteFile, HubError> {
    let file = RemoteFile::named(repo, &sibling.rfilename)?;
    let (size, hash) = match sibling.lfs {
        Some(large) => (large.size.or(sibling.size), large.sha256),
        None => (sibling.size, sibling.blob_id),
    };
    Ok(RemoteFile { size, hash: hash.as_deref().and_then(ContentHash::from_etag), ..file })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repo::RepoKind;

    fn parsed(json: &str) -> Result<(String, Vec<RemoteFile>), String> {
        let repo = Repo::new(RepoKind::Model, "org/name").unwrap();
        parse(&repo, "https://hub.example", json.as_bytes(), 3).map_err(|e| e.to_string())
    }

    const SHA: &str = "0123456789012345678901234567890123456789";

    #[test]
    fn sizes_and_hashes() {
        let oid = "a".repeat(64);
        let text = format!(
            r#"{{"sha": "{SHA}", "private": false, "siblings": [
            {{"rfilename": "m.safetensors", "size": 9, "blobId": "{SHA}", "lfs": {{"sha256": "{oid}", "size": 9}}}},
            {{"rfilename": "a.json", "size": 3, "blobId": "{SHA}"}}, {{"rfilename": "b/c"}}]}}"#
        );
        let (commit, files) = parsed(&text).unwrap();
        assert_eq!(commit, SHA);
        assert_eq!(
            files.iter().map(RemoteFile::name).collect::<Vec<_>>(),
            ["a.json", "b/c", "m.safetensors"]
        );
        assert_eq!(files[0].hash, Some(ContentHash::GitSha1(SHA.into())));
        assert_eq!((files[1].size, &files[1].hash), (None, &None));
        assert_eq!(files[2].hash, Some(ContentHash::Sha256(oid)));
    }

    #[test]
    fn hostile_answers_are_refused() {
        let with = |names: &[&str]| {
            let list: Vec<_> = names.iter().map(|n| serde_json::json!({ "rfilename": n })).collect();
            parsed(&serde_json::json!({ "sha": SHA, "siblings": list }).to_string())
        };
        assert!(with(&["a", "b/c"]).is_ok());
        for names in [&["../x"][..], &["a", "/etc/passwd"], &["a\\b"], &["a", "a/b"], &["a", "b", "c", "d"]] {
            assert!(with(names).is_err(), "{names:?}");
        }
        for text in ["", "[]", "{}", r#"{"sha": "../../x"}"#, r#"{"sha": 1}"#] {
            assert!(parsed(text).is_err(), "{text}");
        }
        insta::assert_snapshot!(with(&["a/../../x"]).unwrap_err(), @r#"model org/name contains a file with the unsafe name "a/../../x": it contains `.` or `..`"#);
    }
}
