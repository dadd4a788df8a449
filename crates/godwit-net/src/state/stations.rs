//! MAC addresses and VLANs from which the guest sent lately. Their announcements teach switches the VM's new location.

use std::time::Duration;

use crate::frame::vlan::Vlan;
use crate::mac::Mac;

/// Most remembered stations: a bridge in the guest may send for many.
pub const MOST_STATIONS: usize = 1024;

/// Time for which a station is remembered: the default aging time of switches (IEEE 802.1D).
pub const REMEMBERED: Duration = Duration::from_secs(300);

/// A MAC address in a VLAN or without a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Station {
    /// MAC address of the station.
    pub mac: Mac,
    /// VLAN of the station; `None` for frames without a tag.
    pub vlan: Option<Vlan>,
}

impl std::fmt::Display for Station {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.mac.fmt(f)?;
        match self.vlan {
            Some(vlan) => write!(f, " in VLAN {}", vlan.number()),
            None => Ok(()),
        }
    }
}

/// Stations, the most recent sender first, each with the time at which it is forgotten. Times count from the creation
/// of the NIC.
#[derive(Clone, Debug, Default)]
pub struct Stations(Vec<(Station, Duration)>);

impl Stations {
    /// Records a frame sent by the guest as this station.
    pub fn sent(&mut self, station: Station, now: Duration) {
        match self.0.iter().position(|(known, _)| *known == station) {
            Some(place) => self.0[..=place].rotate_right(1),
            None => {
                self.0.truncate(MOST_STATIONS - 1);
                self.0.insert(0, (station, now));
            }
        }
        self.0[0].1 = now + REMEMBERED;
    }

    /// Forgets the stations of an address whose frame came from the network.
    pub fn is_elsewhere(&mut self, mac: Mac) {
        self.0.retain(|(station, _)| station.mac != mac);
    }

    /// Returns true if the guest sent from this address.
    pub fn has(&self, mac: Mac) -> bool {
        self.0.iter().any(|(station, _)| station.mac == mac)
    }

    /// Returns the remembered stations, the most recent sender first, each with the time until it is forgotten.
    pub fn remembered(&self, now: Duration) -> impl Iterator<Item = (Station, Duration)> {
        let left = self
            .0
            .iter()
            .map(move |(station, until)| (*station, until.saturating_sub(now)));
        left.filter(|(_, left)| !left.is_zero())
    }

    /// Restores stations from the values of [`Self::remembered`].
    pub fn from_told(told: &[(Station, Duration)], now: Duration) -> Self {
        Self(
            told.iter()
                .map(|(station, left)| (*station, now + *left))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn station(number: u16) -> Station {
        let [high, low] = number.to_be_bytes();
        Station {
            mac: Mac([2, 0, 0, 0, high, low]),
            vlan: Vlan::new(number % 3),
        }
    }

    fn known(stations: &Stations, now: Duration) -> Vec<Station> {
        stations
            .remembered(now)
            .map(|(station, _)| station)
            .collect()
    }

    #[test]
    fn those_that_sent_last_are_known_until_switches_forget_them() {
        let (mut stations, start) = (Stations::default(), Duration::ZERO);
        let most = MOST_STATIONS as u16;
        for number in 0..most + 50 {
            stations.sent(station(number), start);
        }
        let later = start + REMEMBERED / 2;
        stations.sent(station(most), later);
        let all = known(&stations, later);
        assert_eq!(all.len(), MOST_STATIONS);
        assert_eq!(all[..2], [station(most), station(most + 49)]);
        assert_eq!(known(&stations, start + REMEMBERED), [station(most)]);
    }

    #[test]
    fn one_that_is_heard_elsewhere_is_not_the_guests() {
        let (mut stations, now) = (Stations::default(), Duration::ZERO);
        (1..3).for_each(|number| stations.sent(station(number), now));
        stations.is_elsewhere(station(1).mac);
        assert_eq!(known(&stations, now), [station(2)]);
        assert!(!stations.has(station(1).mac) && stations.has(station(2).mac));
    }

    #[test]
    fn what_was_told_is_remembered_as_long_elsewhere() {
        let (mut stations, start) = (Stations::default(), Duration::from_secs(1000));
        stations.sent(station(1), start);
        let now = start + REMEMBERED / 2;
        stations.sent(station(2), now);
        let told: Vec<_> = stations.remembered(now).collect();
        // A clock from zero.
        let elsewhere = Stations::from_told(&told, Duration::ZERO);
        assert_eq!(known(&elsewhere, Duration::ZERO), [station(2), station(1)]);
        assert_eq!(known(&elsewhere, REMEMBERED / 2), [station(2)]);
    }
}
