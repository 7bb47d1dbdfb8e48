//! Decodes a stream of tokens to text, and finds stop strings.

use lockstep_data::{DataError, Tokenizer};

/// Turns a stream of tokens into a stream of text. A token may hold only part of a character, and some tokenizers
/// decode a word differently at the start of a text. The new text is therefore what the last tokens add to the text of
/// a few tokens before them, and nothing while the last character is incomplete.
#[derive(Debug, Default)]
pub struct TextStream {
    ids: Vec<u32>,
    /// The token that decoding starts at.
    from: usize,
    /// The text of the tokens before this one has been returned.
    returned: usize,
}

impl TextStream {
    /// The text that `id` completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, DataError> {
        self.ids.push(id);
        let before = tokenizer.decode(&self.ids[self.from..self.returned], true)?;
        let now = tokenizer.decode(&self.ids[self.from..], true)?;
        if now.len() <= before.len() || now.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let new = now.get(before.len()..).unwrap_or_default().to_string();
        (self.from, self.returned) = (self.returned, self.ids.len());
        Ok(new)
    }

    /// The remaining text after the last token.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, DataError> {
        let before = tokenizer.decode(&self.ids[self.from..self.returned], true)?;
        let now = tokenizer.decode(&self.ids[self.from..], true)?;
        (self.from, self.returned) = (self.ids.len(), self.ids.len());
        Ok(now.get(before.len()..).unwrap_or_default().to_string())
    }
}

/// Ends a text at the first stop string, which may arrive in pieces.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the start of a stop string.
    held: String,
}

impl StopStrings {
    pub fn new(stops: Vec<String>) -> StopStrings {
        StopStrings { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Returns the text that can be shown, and whether a stop string was found.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let begins = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]));
        let safe = self.held.char_indices().map(|(at, _)| at).find(|at| begins(*at));
        let rest = self.held.split_off(safe.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The text that was held back and turned out not to be a stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_data::TokenizerSource;

    #[test]
    fn characters_are_returned_whole() {
        let tokenizer = Tokenizer::load(&TokenizerSource::Byte).unwrap();
        let text = "Grüße, 世界 🚲!";
        let mut stream = TextStream::default();
        let pieces: Vec<String> =
            tokenizer.encode(text).unwrap().iter().map(|id| stream.push(&tokenizer, *id).unwrap()).collect();
        assert_eq!(pieces.concat() + &stream.finish(&tokenizer).unwrap(), text);
        assert!(pieces.iter().any(|p| p == "世"));
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_never_shown() {
        let mut stop = StopStrings::new(vec!["\n\nQ:".into(), "END".into()]);
        assert_eq!(stop.push("four\n"), ("four".into(), false));
        assert_eq!(stop.push("\nthen E"), ("\n\nthen ".into(), false));
        assert_eq!(stop.push("Nough"), ("ENough".into(), false));
        assert_eq!(stop.push("\n"), ("".into(), false));
        assert_eq!(stop.push("\nQ: more"), ("".into(), true));
        let mut none = StopStrings::new(vec![]);
        assert_eq!(none.push("anything"), ("anything".into(), false));
    }
}
