//! The wire format of the messages that ranks exchange while they connect. Version 1.
//!
//! A peer may run another version of lockstep, so every field is checked when it is decoded.

use crate::shm::{FileAddress, ShmAddress};

const VERSION: u64 = 1;
/// The limit on the length of every string and list in a message.
const MAX_LEN: u64 = 1 << 16;

/// The first round: the rank's host, and how its memory can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankAddress {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) host: String,
    /// How ranks on the same host can open its memory, or why they cannot.
    pub(crate) shm: Result<ShmAddress, String>,
}

impl RankAddress {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.words(&[self.rank.into(), self.world.into()]);
        out.text(&self.host);
        match &self.shm {
            Ok(shm) => {
                out.words(&[1, shm.pid.into(), shm.regions.len() as u64]);
                for file in std::iter::once(&shm.block).chain(&shm.regions) {
                    out.words(&[file.fd.into(), file.device, file.inode, file.len]);
                }
            }
            Err(why) => {
                out.words(&[0]);
                out.text(why);
            }
        }
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<RankAddress> {
        let mut from = Reader::new(bytes)?;
        let (rank, world, host) = (from.small()?, from.small()?, from.text()?);
        let shm = match from.word()? {
            0 => Err(from.text()?),
            1 => {
                let (pid, regions) = (from.small()?, from.word().filter(|n| *n <= MAX_LEN)?);
                let mut file = || {
                    Some(FileAddress {
                        fd: from.small()?,
                        device: from.word()?,
                        inode: from.word()?,
                        len: from.word()?,
                    })
                };
                let block = file()?;
                Ok(ShmAddress { pid, block, regions: (0..regions).map(|_| file()).collect::<Option<_>>()? })
            }
            _ => return None,
        };
        from.end(RankAddress { rank, world, host, shm })
    }
}

/// The later rounds: a string, such as an address or the reason for a failure.
pub(crate) fn encode_text(text: &str) -> Vec<u8> {
    let mut out = Writer::new();
    out.text(text);
    out.0
}

pub(crate) fn decode_text(bytes: &[u8]) -> Option<String> {
    let mut from = Reader::new(bytes)?;
    let text = from.text()?;
    from.end(text)
}

struct Writer(Vec<u8>);

impl Writer {
    fn new() -> Writer {
        Writer(VERSION.to_le_bytes().to_vec())
    }

    fn words(&mut self, words: &[u64]) {
        words.iter().for_each(|word| self.0.extend_from_slice(&word.to_le_bytes()));
    }

    fn text(&mut self, text: &str) {
        let mut end = text.len().min(MAX_LEN as usize);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.words(&[end as u64]);
        self.0.extend_from_slice(&text.as_bytes()[..end]);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Option<Reader<'a>> {
        let mut reader = Reader(bytes);
        (reader.word()? == VERSION).then_some(reader)
    }

    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn small(&mut self) -> Option<u32> {
        self.word()?.try_into().ok()
    }

    fn text(&mut self) -> Option<String> {
        let len = self.word().filter(|n| *n <= MAX_LEN)? as usize;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    /// Returns the value if all bytes have been read.
    fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_encoding_and_truncated_ones_are_rejected() {
        let file = FileAddress { fd: 3, device: 4, inode: 5, len: 6 };
        let shm = Ok(ShmAddress { pid: 77, block: file, regions: vec![file, FileAddress { fd: 9, ..file }] });
        for shm in [shm, Err("no shared memory".to_string())] {
            let address = RankAddress { rank: 1, world: 2, host: "host".into(), shm };
            let bytes = address.encode();
            assert_eq!(RankAddress::decode(&bytes), Some(address));
            for len in 0..bytes.len() {
                assert_eq!(RankAddress::decode(&bytes[..len]), None);
            }
            assert_eq!(RankAddress::decode(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(decode_text(&encode_text("10.0.0.1:80")).as_deref(), Some("10.0.0.1:80"));
        assert_eq!(decode_text(&[0; 16]), None);
    }
}
