//! `lockstep chat`: a conversation in the terminal.

use std::cell::RefCell;
use std::io::{BufRead, IsTerminal};
use std::time::{SystemTime, UNIX_EPOCH};

use lockstep_data::{Chat as Conversation, ChatTemplate, DataError, DateTime, TemplateSource, Tokenizer};
use lockstep_train::generate::SampledToken;
use serde_json::{Value, json};

use crate::args::{Chat, TemplateFlags};
use crate::generate::{self, Listening};
use crate::report::{self, Failure};
use crate::train::boxed;

const HELP: &str =
    "/new starts over, /system TEXT sets the system message, /undo takes back a turn, /quit ends";

/// What is said so far, and what is being said.
struct Talk<'a> {
    template: &'a ChatTemplate,
    tokenizer: &'a Tokenizer,
    stops: &'a [String],
    capacity: usize,
    messages: Vec<Value>,
    reply: Listening,
    so_far: String,
    terminal: bool,
    failed: Option<Failure>,
}

pub(crate) fn run(args: &Chat) -> Result<(), Failure> {
    let mut generator = generate::open(&args.model, 1)?;
    let tokenizer = generator.tokenizer();
    let template = load_template(&args.template, &tokenizer)?;
    let how = generate::sampling(generator.default_sampling(), &args.sampling);
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        report::aside(&format!(
            "{} with room for {} tokens, {} of memory. {HELP}.",
            args.model.model.display(),
            generator.capacity(),
            generator.memory(),
        ));
    }
    let mut messages = Vec::new();
    messages.extend(args.system.as_ref().map(|text| message("system", text)));
    let talk = RefCell::new(Talk {
        template: &template,
        tokenizer: &tokenizer,
        stops: &args.sampling.stop,
        capacity: generator.capacity(),
        messages,
        reply: Listening::new(&args.sampling.stop),
        so_far: String::new(),
        terminal,
        failed: None,
    });
    let mut began = false;
    let mut turn = |_: &[u32]| {
        let mut talk = talk.borrow_mut();
        if std::mem::replace(&mut began, true) {
            talk.end_reply();
        }
        talk.next_prompt()
    };
    let mut listener = |drawn: SampledToken| talk.borrow_mut().hear(drawn.token);
    generator.converse(args.sampling.max_new_tokens, how, &mut turn, &mut listener).map_err(boxed)?;
    talk.into_inner().failed.map_or(Ok(()), Err)
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

impl Talk<'_> {
    fn hear(&mut self, token: u32) -> bool {
        let (text, goes_on) = self.reply.hear(self.tokenizer, token);
        self.show(&text);
        goes_on && self.failed.is_none()
    }

    fn show(&mut self, text: &str) {
        self.so_far.push_str(text);
        if let Err(failure) = report::print(text) {
            self.failed.get_or_insert(failure);
        }
    }

    /// The reply is over: what it said becomes part of the conversation.
    fn end_reply(&mut self) {
        let rest = self.reply.rest(self.tokenizer);
        self.show(&rest);
        self.show("\n");
        let said = std::mem::take(&mut self.so_far);
        self.messages.push(message("assistant", said.trim_end_matches('\n')));
        self.reply = Listening::new(self.stops);
    }

    /// Reads lines until one is something to answer. `None`: the conversation is over.
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
                "/help" | "/?" => report::aside(HELP),
                "/new" => self.messages.retain(|m| m["role"] == "system"),
                "/undo" => self.undo(),
                command if command.starts_with("/system") => {
                    self.set_system(command["/system".len()..].trim())
                }
                command if command.starts_with('/') => {
                    report::aside(&format!("{command} is no command. {HELP}."))
                }
                said => {
                    self.messages.push(message("user", said));
                    match self.prompt() {
                        Ok(prompt) => return Some(prompt),
                        Err(why) => {
                            self.messages.pop();
                            report::aside(&why);
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
                "the conversation has {now} tokens, and there is room for {room}: /new starts over"
            ));
        }
        Ok(tokens)
    }

    /// Takes back the last question and its answer.
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
