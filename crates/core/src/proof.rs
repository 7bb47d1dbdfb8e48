//! Proofs of knowledge of a shared secret, without sending it: HMAC-SHA-256 over labelled parts.
//!
//! The verifier sends a fresh nonce. The answer is a tag over a label (what is proved, and by which side), the nonces of
//! both sides, and everything that the two must agree on. Parts are counted and length-prefixed, so that different lists
//! of parts never give the same message, and the label makes a tag useless for any other purpose. Nonces and the order of
//! messages are up to the protocols.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// The size of a secret, a tag and a nonce.
pub const PROOF_BYTES: usize = 32;

/// A 32-byte key shared by the ranks of a run. Never printed; wiped when dropped.
#[derive(Clone)]
pub struct Secret(Zeroizing<[u8; PROOF_BYTES]>);

impl Secret {
    /// Uses these bytes as the key, for example from the system's random number generator.
    pub fn from_bytes(bytes: [u8; PROOF_BYTES]) -> Secret {
        Secret(Zeroizing::new(bytes))
    }

    /// Derives the key from a token. This adds no strength: a short token is easy to guess.
    pub fn from_text(token: &str) -> Secret {
        let mut hash = Sha256::new();
        hash.update(b"lockstep token\0");
        hash.update(token.as_bytes());
        Secret(Zeroizing::new(hash.finalize().into()))
    }

    /// Derives another secret for one purpose, such as the session of a run or a pair of ranks.
    pub fn derive(&self, label: &str, parts: &[&[u8]]) -> Secret {
        Secret(Zeroizing::new(self.mac(b'd', label, parts).finalize().into_bytes().into()))
    }

    /// A proof of this secret over `parts`.
    pub fn tag(&self, label: &str, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(b't', label, parts).finalize().into_bytes().into()
    }

    /// Whether `tag` is the proof over `parts`, in constant time.
    pub fn verify(&self, label: &str, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.mac(b't', label, parts).verify_slice(tag).is_ok()
    }

    fn mac(&self, use_: u8, label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&*self.0).expect("HMAC takes keys of any length");
        mac.update(b"lockstep proof 1");
        mac.update(&[use_]);
        let mut part = |bytes: &[u8]| {
            mac.update(&(bytes.len() as u64).to_le_bytes());
            mac.update(bytes);
        };
        part(label.as_bytes());
        part(&(parts.len() as u64).to_le_bytes());
        parts.iter().for_each(|bytes| part(bytes));
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_verifies_only_with_its_secret_label_and_parts() {
        let secret = Secret::from_text("correct horse");
        let tag = secret.tag("hello", &[b"ab", b"c"]);
        assert!(secret.verify("hello", &[b"ab", b"c"], &tag));
        assert!(!secret.verify("hello", &[b"a", b"bc"], &tag));
        assert!(!secret.verify("hello", &[b"ab", b"c", b""], &tag));
        assert!(!secret.verify("answer", &[b"ab", b"c"], &tag));
        assert!(!secret.verify("hello", &[b"ab", b"c"], &tag[..31]));
        assert!(!secret.verify("hello", &[b"ab", b"c"], &[]));
        assert!(!Secret::from_text("correct horse ").verify("hello", &[b"ab", b"c"], &tag));
        for i in 0..PROOF_BYTES {
            let mut wrong = tag;
            wrong[i] ^= 1;
            assert!(!secret.verify("hello", &[b"ab", b"c"], &wrong));
        }
    }

    #[test]
    fn derived_secrets_differ_from_tags_and_from_each_other() {
        let secret = Secret::from_bytes([7; 32]);
        let tag = |s: &Secret| s.tag("x", &[]);
        let run = secret.derive("run", &[b"1"]);
        assert_eq!(tag(&run), tag(&secret.derive("run", &[b"1"])));
        assert_ne!(tag(&run), tag(&secret.derive("run", &[b"2"])));
        assert_ne!(tag(&run), tag(&Secret::from_bytes(secret.tag("run", &[b"1"]))));
    }

    #[test]
    fn a_secret_is_never_printed() {
        assert_eq!(format!("{:?}", Secret::from_text("token")), "Secret(..)");
    }
}
