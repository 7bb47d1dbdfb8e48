//! What a head says of every token.

/// One number per token. An objective gives a coefficient for each: the derivative of the loss by that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Channel {
    /// The log-probability of the token's target.
    LogProb,
    /// The entropy of the distribution that the target is drawn from.
    Entropy,
    /// The mean of the log-probabilities over the vocabulary.
    MeanLogProb,
    /// The scalar head's output: a value or a reward.
    Value,
}

impl Channel {
    pub const COUNT: usize = 4;
    pub const ALL: [Channel; Channel::COUNT] =
        [Channel::LogProb, Channel::Entropy, Channel::MeanLogProb, Channel::Value];
}

/// Which channels a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    has: [bool; Channel::COUNT],
}

impl Channels {
    /// Log-probabilities alone.
    pub const LOG_PROB: Channels = Channels::of(&[Channel::LogProb]);
    /// What a scalar head gives.
    pub const VALUE: Channels = Channels::of(&[Channel::Value]);

    pub const fn of(channels: &[Channel]) -> Channels {
        let mut has = [false; Channel::COUNT];
        let mut i = 0;
        while i < channels.len() {
            has[channels[i] as usize] = true;
            i += 1;
        }
        Channels { has }
    }

    pub fn contains(&self, channel: Channel) -> bool {
        self.has[channel as usize]
    }

    /// In the order in which buffers have them.
    pub fn iter(&self) -> impl Iterator<Item = Channel> + use<> {
        let has = self.has;
        Channel::ALL.into_iter().filter(move |channel| has[*channel as usize])
    }

    pub fn count(&self) -> usize {
        self.iter().count()
    }

    /// A channel's place in that order.
    pub fn index(&self, channel: Channel) -> Option<usize> {
        self.iter().position(|one| one == channel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_stand_in_one_order() {
        let some = Channels::of(&[Channel::MeanLogProb, Channel::LogProb]);
        assert_eq!(some.iter().collect::<Vec<_>>(), [Channel::LogProb, Channel::MeanLogProb]);
        assert_eq!((some.index(Channel::MeanLogProb), some.index(Channel::Value)), (Some(1), None));
        assert_eq!((some.count(), Channels::VALUE.count()), (2, 1));
    }
}
