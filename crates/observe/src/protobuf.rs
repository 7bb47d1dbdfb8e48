//! Encodes protobuf messages by hand: those that trackers read are simple enough.

/// The wire types.
const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const DELIMITED: u8 = 2;
const FIXED_32: u8 = 5;

/// A protobuf message in its binary form.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message(pub(crate) Vec<u8>);

impl Message {
    fn key(&mut self, field: u32, wire_type: u8) {
        self.number(u64::from(field << 3 | u32::from(wire_type)));
    }

    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub(crate) fn varint(mut self, field: u32, value: u64) -> Message {
        self.key(field, VARINT);
        self.number(value);
        self
    }

    pub(crate) fn float(mut self, field: u32, value: f32) -> Message {
        self.key(field, FIXED_32);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn double(mut self, field: u32, value: f64) -> Message {
        self.key(field, FIXED_64);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn text(self, field: u32, text: &str) -> Message {
        self.bytes(field, text.as_bytes())
    }

    pub(crate) fn message(self, field: u32, inner: &Message) -> Message {
        self.bytes(field, &inner.0)
    }

    fn bytes(mut self, field: u32, bytes: &[u8]) -> Message {
        self.key(field, DELIMITED);
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }
}

/// A reflected CRC-32 of `bytes`, with the polynomial of `table`. It continues from `crc`, which is 0 at the start.
pub(crate) fn crc32(table: &[u32; 256], crc: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!crc, |crc, byte| crc >> 8 ^ table[(crc as u8 ^ byte) as usize])
}

/// The table of a reflected polynomial.
pub(crate) const fn crc_table(polynomial: u32) -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ polynomial } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The number and bytes of each field; varints are widened to eight bytes.
    pub(crate) fn fields(mut bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
        fn varint(bytes: &mut &[u8]) -> u64 {
            let (mut value, mut shift) = (0u64, 0);
            loop {
                let byte = bytes[0];
                *bytes = &bytes[1..];
                value |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte < 0x80 {
                    return value;
                }
            }
        }
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let value = match key & 7 {
                0 => varint(&mut bytes).to_le_bytes().to_vec(),
                1 => bytes[..8].to_vec(),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    bytes[..length].to_vec()
                }
                5 => bytes[..4].to_vec(),
                other => panic!("wire type {other}"),
            };
            if key & 7 != 0 {
                bytes = &bytes[value.len()..];
            }
            found.push(((key >> 3) as u32, value));
        }
        found
    }

    #[test]
    fn fields_above_15_have_longer_keys() {
        let message = Message::default().varint(200, 300).text(1, "a").double(2, 1.0);
        assert_eq!(message.0[..4], [0xc0, 0x0c, 0xac, 0x02]);
        let found = fields(&message.0);
        assert_eq!(found[0], (200, 300u64.to_le_bytes().to_vec()));
        assert_eq!(found[1], (1, b"a".to_vec()));
        assert_eq!(found[2], (2, 1f64.to_le_bytes().to_vec()));
    }

    #[test]
    fn known_checksums() {
        let (castagnoli, ieee) = (crc_table(0x82f6_3b78), crc_table(0xedb8_8320));
        assert_eq!(crc32(&castagnoli, 0, b"123456789"), 0xe306_9283);
        assert_eq!(crc32(&castagnoli, 0, &[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32(&ieee, 0, b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(&ieee, crc32(&ieee, 0, b"12345"), b"6789"), 0xcbf4_3926);
    }
}
