//! Requests in flight.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

use super::error::RouterError;
use super::load::Share;
use super::registry::WorkerId;

/// Names a request from its selection to its end; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub u64);

/// How a request ended, as far as it tells something about the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered, also by an error that the client caused.
    Completed,
    /// The worker broke: no connection, a reset, an internal error.
    Failed,
    /// The worker would not take it (overloaded, loading).
    Refused,
    /// The client went away.
    Cancelled,
}

impl Outcome {
    /// The outcome of this name: `completed`, `failed`, `refused` or `cancelled`.
    ///
    /// # Errors
    /// It is another name.
    pub fn from_name(name: &str) -> Result<Self, RouterError> {
        match name {
            "completed" => Ok(Self::Completed),
            "failed" => Ok(Self::Failed),
            "refused" => Ok(Self::Refused),
            "cancelled" => Ok(Self::Cancelled),
            _ => Err(RouterError::UnknownOutcome(name.to_owned())),
        }
    }
}

/// One request in flight.
pub(super) struct Ticket {
    pub(super) worker: WorkerId,
    pub(super) share: Share,
    pub(super) probe: bool,
    pub(super) started: bool,
    /// The prompt's chain while it can still come to nothing.
    pub(super) chain: Vec<u64>,
    pub(super) cached_blocks: usize,
}

/// All of them, by id.
#[derive(Default)]
pub(super) struct Tickets {
    by_id: HashMap<TicketId, Ticket, FxBuildHasher>,
    next: u64,
}

impl Tickets {
    /// The id that the next ticket gets.
    pub(super) fn upcoming(&self) -> TicketId {
        TicketId(self.next)
    }

    pub(super) fn insert(&mut self, ticket: Ticket) {
        self.by_id.insert(TicketId(self.next), ticket);
        self.next += 1;
    }

    pub(super) fn get_mut(&mut self, id: TicketId) -> Option<&mut Ticket> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn take(&mut self, id: TicketId) -> Option<Ticket> {
        self.by_id.remove(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}
