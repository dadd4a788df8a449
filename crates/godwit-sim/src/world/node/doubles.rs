//! Double writes between their sending and their acknowledgement.

use godwit_core::request::RequestTag;

#[derive(Debug)]
pub(crate) struct DoubleWrites {
    /// Double writes not acknowledged by the destination, by tag: the names in their frames.
    sent: Vec<Option<u32>>,
    /// Names of double writes whose requests were answered first.
    posted: Vec<u32>,
    /// Additions to `posted` in this call.
    early_answers: u64,
    /// True if a migration from this node paused or ended in this call.
    excused: bool,
}

impl DoubleWrites {
    pub(crate) fn new(tags: u32) -> Self {
        Self {
            sent: vec![None; tags as usize],
            posted: Vec::new(),
            early_answers: 0,
            excused: false,
        }
    }

    pub(crate) fn sent(&mut self, tag: RequestTag, name: u32) {
        self.sent[tag.0 as usize] = Some(name);
    }

    /// Notes the answer to a request.
    pub(crate) fn answered(&mut self, tag: RequestTag, succeeded: bool) {
        if let (Some(name), true) = (self.sent[tag.0 as usize].take(), succeeded) {
            self.posted.push(name);
            self.early_answers += 1;
        }
    }

    pub(crate) fn acknowledged(&mut self, name: u32) {
        self.posted.retain(|posted| *posted != name);
        for sent in &mut self.sent {
            sent.take_if(|sent| *sent == name);
        }
    }

    /// Ends the wait for the destination after a pause or an abort. Returns the number of double writes given up.
    pub(crate) fn give_up(&mut self) -> u64 {
        self.excused = true;
        let given_up = self.sent.iter().flatten().count();
        self.sent.fill(None);
        self.posted.clear();
        given_up as u64
    }

    /// Ends a call. Returns the number of requests that the call answered before their double writes were acknowledged,
    /// unless a pause or an end excuses the call.
    pub(crate) fn end_call(&mut self) -> u64 {
        let early = std::mem::take(&mut self.early_answers);
        if std::mem::take(&mut self.excused) {
            0
        } else {
            early
        }
    }

    pub(crate) fn posted(&self) -> &[u32] {
        &self.posted
    }
}
