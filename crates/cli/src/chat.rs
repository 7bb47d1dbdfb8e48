//! `lockstep chat`: a conversation in the terminal.

use std::cell::RefCell;
use std::io::{BufRead, IsTerminal};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_data::{Chat as Conversation, ChatTemplate, DataError, DateTime, TemplateSource, Tokenizer};
use lockstep_train::generate::SampledToken;
use serde_json::{Value, json};

use crate::args::{Chat, TemplateFlags};
use crate::generate::{self, Decoder};
use crate::report::{self, Failure};
use crate::train::boxed;

const HELP: &str =
    "/new starts over, /system TEXT sets the system message, /undo removes the last turn, /quit ends";

/// The conversation so far, and the reply that is being generated.
struct Dialogue<'a> {
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    stops: &'a [String],
    capacity: usize,
    messages: Vec<Value>,
    reply: Decoder,
    so_far: String,
    terminal: bool,
    failed: Option<Failure>,
}

pub(crate) fn run(args: &Chat) -> Result<(), Failure> {
    let mut generator = generate::open(&args.model, 1)?;
    let tokenizer = generator.tokenizer();
    let template = load_template(&args.template, &tokenizer)?;
    let sampling = generate::sampling(generator.default_sampling(), &args.sampling);
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        report::print_aside(&format!(
            "{}: context of {} tokens, {} of memory. {HELP}.",
            args.model.model.display(),
            generator.capacity(),
            generator.memory(),
        ));
    }
    let mut messages = Vec::new();
    messages.extend(args.system.as_ref().map(|text| message("system", text)));
    let dialogue = RefCell::new(Dialogue {
        template: &template,
        tokenizer: &tokenizer,
        stops: &args.sampling.stop,
        capacity: generator.capacity(),
        messages,
        reply: Decoder::new(&args.sampling.stop),
        so_far: String::new(),
        terminal,
        failed: None,
    });
    let mut began = false;
    let mut turn = |_: &[u32]| {
        let mut dialogue = dialogue.borrow_mut();
        if std::mem::replace(&mut began, true) {
            dialogue.end_reply();
        }
        dialogue.next_prompt()
    };
    let mut listener = |sampled: SampledToken| dialogue.borrow_mut().push(sampled.token);
    generator.converse(args.sampling.max_new_tokens, sampling, &mut turn, &mut listener).map_err(boxed)?;
    dialogue.into_inner().failed.map_or(Ok(()), Err)
}

pub(crate) fn load_template(flags: &TemplateFlags, tokenizer: &Tokenizer) -> Result<ChatTemplate, Failure> {
    let source = match flags.chat_template.as_deref() {
        None => TemplateSource::Tokenizer,
        Some("builtin") => TemplateSource::Builtin,
        Some(path) => TemplateSource::Path(path.into()),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let loaded = ChatTemplate::load(&source, tokenizer, DateTime::from_unix(now));
    loaded.map_err(|e: DataError| -> Failure { Box::new(e) })
}

fn message(role: &str, text: &str) -> Value {
    json!({ "role": role, "content": text })
}

impl Dialogue<'_> {
    /// Prints the text of a token. Returns whether the reply continues.
    fn push(&mut self, token: u32) -> bool {
        let (text, continues) = self.reply.push(self.tokenizer, token);
        self.show(&text);
        continues && self.failed.is_none()
    }

    fn show(&mut self, text: &str) {
        self.so_far.push_str(text);
        if let Err(failure) = report::print(text) {
            self.failed.get_or_insert(failure);
        }
    }

    /// Adds the finished reply to the conversation.
    fn end_reply(&mut self) {
        let rest = self.reply.rest(self.tokenizer);
        self.show(&rest);
        self.show("\n");
        let reply = std::mem::take(&mut self.so_far);
        self.messages.push(message("assistant", reply.trim_end_matches('\n')));
        self.reply = Decoder::new(self.stops);
    }

    /// Reads lines until one needs a reply. `None`: the conversation is over.
    fn next_prompt(&mut self) -> Option<Vec<u32>> {
        while self.failed.is_none() {
            if self.terminal {
                self.failed = report::print("> ").err();
            }
            let mut line = String::new();
            match std::io::stdin().lock().read_line(&mut line) {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
            match line.trim() {
                "" => {}
                "/quit" | "/exit" => return None,
                "/help" | "/?" => report::print_aside(HELP),
                "/new" => self.messages.retain(|m| m["role"] == "system"),
                "/undo" => self.undo(),
                command if command.starts_with("/system") => {
                    self.set_system(command["/system".len()..].trim())
                }
                command if command.starts_with('/') => {
                    report::print_aside(&format!("unknown command {command}. {HELP}."))
                }
                text => {
                    self.messages.push(message("user", text));
                    match self.prompt() {
                        Ok(prompt) => return Some(prompt),
                        Err(why) => {
                            self.messages.pop();
                            report::print_aside(&why);
                        }
                    }
                }
            }
        }
        None
    }

    fn prompt(&self) -> Result<Vec<u32>, String> {
        let chat = Conversation { messages: self.messages.clone(), ..Conversation::default() };
        let text = self.template.prompt(&chat).map_err(|e| e.to_string())?;
        let tokens = self.tokenizer.encode_plain(&text).map_err(|e| e.to_string())?;
        if tokens.len() >= self.capacity {
            let (now, room) = (tokens.len(), self.capacity);
            return Err(format!(
                "the conversation has {now} tokens, but the context is limited to {room}: /new starts over"
            ));
        }
        Ok(tokens)
    }

    /// Removes the last question and its answer.
    fn undo(&mut self) {
        while let Some(last) = self.messages.pop_if(|m| m["role"] != "system") {
            if last["role"] == "user" {
                return;
            }
        }
    }

    fn set_system(&mut self, text: &str) {
        self.messages.retain(|m| m["role"] != "system");
        if !text.is_empty() {
            self.messages.insert(0, message("system", text));
        }
    }
}
