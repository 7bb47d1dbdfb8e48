//! Rewards from an HTTP endpoint: one POST per batch. `docs/rewards.md` describes the protocol.
//!
//! Redirects are not followed: the samples and the token go where the configuration says.

use std::io::Read as _;
use std::time::{Duration, Instant};

use serde::Serialize;
use ureq::http::Uri;
use ureq::{Agent, Body};

use crate::error::RewardError;
use crate::fault::HttpFault;
use crate::function::{RewardFunction, Sample, ScoreFailure, ScoreReport};
use crate::token::RewardToken;
use crate::wire::{Answer, BadReward, SampleMessage, excerpt};

const USER_AGENT: &str = concat!("lockstep/", env!("CARGO_PKG_VERSION"));
const MAX_TIMEOUT_S: f64 = 86_400.0;
/// The largest answer: a little room, and more than enough for each number.
const ANSWER_BYTES: u64 = 64 << 10;
const ANSWER_BYTES_PER_SAMPLE: u64 = 64;
/// Attempts at a request that cannot be sent, or that is answered with status 429, 502, 503 or 504.
const MAX_ATTEMPTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// How much of the body of a failed request the message may quote.
const MAX_MESSAGE_BYTES: u64 = 1024;

/// An HTTP endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Http {
    pub url: String,
    /// How long a batch may take, repeated attempts included.
    pub timeout_s: f64,
    /// Sent as a bearer token.
    pub token: Option<RewardToken>,
}

impl Http {
    /// An endpoint with default options: 60 seconds per batch, no token.
    pub fn new(url: &str) -> Http {
        Http { url: url.to_owned(), timeout_s: 60.0, token: None }
    }
}

pub(crate) struct HttpReward {
    name: String,
    options: Http,
    origin: String,
    agent: Agent,
}

#[derive(Serialize)]
struct Request<'a> {
    samples: Vec<SampleMessage<'a>>,
}

impl HttpReward {
    pub(crate) fn new(name: &str, options: &Http) -> Result<HttpReward, RewardError> {
        let bad = |option, value: String, why: &str| {
            let (function, why) = (name.to_owned(), why.to_owned());
            RewardError::BadOption { function, option, value, why }
        };
        let bad_url = |why| bad("url", "not usable".into(), why);
        let uri: Uri = options.url.parse().map_err(|_| bad_url("it is not a URL"))?;
        let (Some("http" | "https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(bad_url("it must begin with http:// or https://"));
        };
        if authority.as_str().contains('@') {
            return Err(bad_url(
                "it contains a user name; name an environment variable with a token instead",
            ));
        }
        if !(options.timeout_s > 0.0 && options.timeout_s <= MAX_TIMEOUT_S) {
            let why = format!("it must be more than 0 and at most {MAX_TIMEOUT_S} seconds");
            return Err(bad("timeout_s", options.timeout_s.to_string(), &why));
        }
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(USER_AGENT);
        // A server on this machine is not behind the proxy.
        if matches!(authority.host(), "localhost" | "[::1]") || authority.host().starts_with("127.") {
            config = config.proxy(None);
        }
        Ok(HttpReward {
            name: name.to_owned(),
            options: options.clone(),
            origin: format!("{}://{authority}", uri.scheme_str().unwrap_or_default()),
            agent: config.build().into(),
        })
    }

    /// The endpoint's answer, after several attempts if need be.
    fn request(&self, body: &[u8], limit_bytes: u64) -> Result<Vec<u8>, HttpFault> {
        let timeout_s = self.options.timeout_s;
        let deadline = Instant::now() + Duration::from_secs_f64(timeout_s);
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            match self.attempt(body, limit_bytes, left) {
                Err(fault) if fault.is_transient() && attempt < MAX_ATTEMPTS && pause < left => {
                    std::thread::sleep(pause);
                    pause *= 4;
                }
                result => return result,
            }
        }
        Err(HttpFault::Timeout { timeout_s })
    }

    fn attempt(&self, body: &[u8], limit_bytes: u64, left: Duration) -> Result<Vec<u8>, HttpFault> {
        let mut request = self.agent.post(&self.options.url).header("Content-Type", "application/json");
        if let Some(token) = &self.options.token {
            request = request.header("Authorization", token.header().as_str());
        }
        let request = request.config().timeout_global(Some(left)).build();
        let response = request.send(body).map_err(|error| self.transport_fault(error))?;
        let status = response.status().as_u16();
        if !(200..300).contains(&status) {
            // The status is what matters; a body that cannot be read changes nothing.
            let mut text = Vec::new();
            let body = response.into_body().into_with_config().limit(u64::MAX).reader();
            let _ = body.take(MAX_MESSAGE_BYTES).read_to_end(&mut text);
            return Err(HttpFault::Status { status, message: self.quote(&text) });
        }
        self.read(response.into_body(), limit_bytes)
    }

    fn read(&self, body: Body, limit_bytes: u64) -> Result<Vec<u8>, HttpFault> {
        let mut bytes = Vec::new();
        let reader = body.into_with_config().limit(u64::MAX).reader();
        match reader.take(limit_bytes + 1).read_to_end(&mut bytes) {
            Ok(_) if bytes.len() as u64 > limit_bytes => Err(HttpFault::TooLarge { limit_bytes }),
            Ok(_) => Ok(bytes),
            Err(cause) => Err(self.transport_fault(ureq::Error::from(cause))),
        }
    }

    fn transport_fault(&self, error: ureq::Error) -> HttpFault {
        let is_timeout = |cause: &std::io::Error| {
            matches!(cause.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock)
        };
        match error {
            ureq::Error::Timeout(_) => HttpFault::Timeout { timeout_s: self.options.timeout_s },
            ureq::Error::Io(cause) if is_timeout(&cause) => {
                HttpFault::Timeout { timeout_s: self.options.timeout_s }
            }
            ureq::Error::HostNotFound => {
                HttpFault::Connection { cause: "the host name cannot be resolved".into() }
            }
            other => HttpFault::Connection { cause: other.to_string() },
        }
    }

    /// A text of the server, for a message: it may repeat the token.
    fn quote(&self, text: &[u8]) -> String {
        let text = String::from_utf8_lossy(text);
        let text = self.options.token.as_ref().map_or_else(|| text.to_string(), |token| token.redact(&text));
        excerpt(text.as_bytes())
    }

    fn error(&self, fault: HttpFault) -> RewardError {
        RewardError::Http { function: self.name.clone(), origin: self.origin.clone(), fault }
    }

    fn try_score(&self, samples: &[Sample<'_>]) -> Result<ScoreReport, HttpFault> {
        let request = Request { samples: samples.iter().map(SampleMessage::new).collect() };
        let body = serde_json::to_vec(&request).expect("samples have text keys only");
        let limit_bytes = ANSWER_BYTES + ANSWER_BYTES_PER_SAMPLE * samples.len() as u64;
        let bytes = self.request(&body, limit_bytes)?;
        let not_an_answer = |why: String| HttpFault::NotAnAnswer { text: self.quote(&bytes), why };
        let answer = Answer::parse(&bytes).map_err(|error| not_an_answer(error.to_string()))?;
        let Some(rewards) = answer.value.get("rewards").and_then(serde_json::Value::as_array) else {
            return Err(not_an_answer("it has no list `rewards`".into()));
        };
        if rewards.len() != samples.len() {
            return Err(HttpFault::WrongLength { samples: samples.len(), rewards: rewards.len() });
        }
        let mut report = ScoreReport::default();
        for (index, value) in rewards.iter().enumerate() {
            let reward = answer.reward(value);
            report.rewards.push(*reward.as_ref().unwrap_or(&None));
            let Err(bad) = reward else { continue };
            match report.failures.first_mut() {
                Some(first) => first.samples.push(index),
                None => {
                    let error = self.error(match bad {
                        BadReward::NotFinite(found) => HttpFault::NotFinite { found },
                        BadReward::WrongType(found) => HttpFault::WrongType { found },
                    });
                    report.failures.push(ScoreFailure { error, samples: vec![index] });
                }
            }
        }
        Ok(report)
    }
}

impl RewardFunction for HttpReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn score(&mut self, samples: &[Sample<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        self.score_each(samples).into_result()
    }

    fn score_each(&mut self, samples: &[Sample<'_>]) -> ScoreReport {
        if samples.is_empty() {
            return ScoreReport::default();
        }
        self.try_score(samples).unwrap_or_else(|fault| ScoreReport::failed(self.error(fault), samples.len()))
    }
}
