//! Limits on the disks received from one peer at a time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_core::units::{Bytes, MigrationId};
use godwit_core::wire::{Refusal, RefusalCode};

use godwit_context::config::IncomingLimits;

/// The disks being received.
#[derive(Debug, Default)]
pub struct Arrivals {
    by_migration: Mutex<HashMap<MigrationId, Arrival>>,
}

#[derive(Debug)]
struct Arrival {
    peer: String,
    bytes: u64,
    /// True once the table of migrations has the migration and knows its end.
    listed: bool,
}

/// The place of an offer not yet in the table of migrations.
#[derive(Debug)]
pub struct Place<'a> {
    arrivals: &'a Arrivals,
    migration: MigrationId,
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, HashMap<MigrationId, Arrival>> {
        self.by_migration
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a disk of `bytes` bytes. `under_way` returns the migrations that have not ended.
    ///
    /// # Errors
    /// [`RefusalCode::Busy`] if the peer is at its limit.
    pub fn admit(
        &self,
        (own, limits): (&str, IncomingLimits),
        (peer, migration, bytes): (&str, MigrationId, u64),
        under_way: impl FnOnce() -> Vec<MigrationId>,
    ) -> Result<Place<'_>, Refusal> {
        let busy = |text: String| {
            Err(Refusal {
                code: RefusalCode::Busy,
                text,
            })
        };
        let mut arrivals = self.lock();
        // A listed migration has begun: unless under way now, it has ended.
        let under_way = under_way();
        arrivals.retain(|id, arrival| !arrival.listed || under_way.contains(id));
        let from_peer = || arrivals.values().filter(|arrival| arrival.peer == peer);
        let (count, sum) = (
            from_peer().count(),
            from_peer().fold(bytes, |sum, arrival| sum.saturating_add(arrival.bytes)),
        );
        if count >= limits.count as usize {
            return busy(format!(
                "node '{own}' receives {count} disks of node '{peer}' already, the most that its \
                 --max-incoming allows: wait until one has arrived"
            ));
        }
        if let Some(most) = limits.bytes.filter(|most| sum > *most) {
            return busy(format!(
                "with this disk node '{own}' would receive {} of node '{peer}' at a time, more than \
                 the {} that its --max-incoming-size allows",
                Bytes(sum),
                Bytes(most)
            ));
        }
        if arrivals.contains_key(&migration) {
            return busy(format!("migration {migration} is being received already"));
        }
        let arrival = Arrival {
            peer: peer.to_owned(),
            bytes,
            listed: false,
        };
        arrivals.insert(migration, arrival);
        Ok(Place {
            arrivals: self,
            migration,
        })
    }
}

impl Place<'_> {
    /// Keeps the place until the end of the migration, which is in the table of migrations.
    pub fn keep(self) {
        if let Some(arrival) = self.arrivals.lock().get_mut(&self.migration) {
            arrival.listed = true;
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut arrivals = self.arrivals.lock();
        if arrivals
            .get(&self.migration)
            .is_some_and(|arrival| !arrival.listed)
        {
            arrivals.remove(&self.migration);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: IncomingLimits = IncomingLimits {
        count: 2,
        bytes: Some(100),
    };

    fn id(number: u8) -> MigrationId {
        MigrationId([number; 16])
    }

    #[test]
    fn a_peer_brings_no_more_disks_than_it_may_and_others_are_not_counted() {
        let arrivals = Arrivals::default();
        let admit = |peer, number, under_way: &[MigrationId]| {
            arrivals.admit(("b", LIMITS), (peer, id(number), 10), || under_way.to_vec())
        };
        admit("a", 1, &[]).unwrap().keep();
        let second = admit("a", 2, &[id(1)]).unwrap();
        let refusal = admit("a", 3, &[id(1)]).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::Busy);
        assert!(refusal.text.contains("--max-incoming allows"), "{refusal}");
        admit("c", 4, &[id(1)]).unwrap().keep();
        // A migration refused later on, and an ended one, leave their places.
        drop(second);
        admit("a", 5, &[id(1), id(4)]).unwrap().keep();
        assert!(admit("a", 6, &[id(1), id(4), id(5)]).is_err());
        assert!(admit("a", 6, &[id(4), id(5)]).is_ok());
    }

    #[test]
    fn a_peer_brings_no_more_bytes_than_it_may() {
        let arrivals = Arrivals::default();
        let admit =
            |number, bytes| arrivals.admit(("b", LIMITS), ("a", id(number), bytes), || vec![id(1)]);
        assert!(admit(1, u64::MAX).is_err());
        admit(1, 60).unwrap().keep();
        let refusal = admit(2, 41).unwrap_err();
        assert!(refusal.text.contains("--max-incoming-size"), "{refusal}");
        assert!(admit(1, 1).is_err(), "the same migration twice");
        assert!(admit(2, 40).is_ok());
    }
}
