//! What ranks tell each other while they set up, as bytes. Version 1.
//!
//! Read with care: whoever answers a rendezvous may have been another version, so nothing is taken on trust.

use crate::shm::{FileAddress, ShmAddress};

const VERSION: u64 = 1;
/// No string or list of a message is longer.
const MAX_LEN: u64 = 1 << 16;

/// The first round: who is where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Whereabouts {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) host: String,
    /// How its memory can be read on its host, or why not.
    pub(crate) shm: Result<ShmAddress, String>,
}

impl Whereabouts {
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

    pub(crate) fn decode(bytes: &[u8]) -> Option<Whereabouts> {
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
        from.end(Whereabouts { rank, world, host, shm })
    }
}

/// The later rounds: a text, such as an address or why something failed.
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

    /// The value, if nothing is left over.
    fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whereabouts_and_back_and_nothing_cut_short() {
        let file = FileAddress { fd: 3, device: 4, inode: 5, len: 6 };
        let shm = Ok(ShmAddress { pid: 77, block: file, regions: vec![file, FileAddress { fd: 9, ..file }] });
        for shm in [shm, Err("no such luck".to_string())] {
            let at = Whereabouts { rank: 1, world: 2, host: "host".into(), shm };
            let bytes = at.encode();
            assert_eq!(Whereabouts::decode(&bytes), Some(at));
            for len in 0..bytes.len() {
                assert_eq!(Whereabouts::decode(&bytes[..len]), None);
            }
            assert_eq!(Whereabouts::decode(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(decode_text(&encode_text("10.0.0.1:80")).as_deref(), Some("10.0.0.1:80"));
        assert_eq!(decode_text(&[0; 16]), None);
    }
}
