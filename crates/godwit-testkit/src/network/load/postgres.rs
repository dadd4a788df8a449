//! A client of PostgreSQL, in the simple query protocol.

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::super::Namespace;
use super::records::{Records, Store};
use super::requests::connect;

/// Version 3.0 of the protocol.
const VERSION: u32 = 3 << 16;
const PARAMETERS: &[u8] = b"user\0postgres\0database\0postgres\0\0";
/// Longest accepted message in bytes.
const LONGEST: usize = 1 << 16;

/// A row of a result, with columns of text.
type Row = Vec<String>;

/// A connection to PostgreSQL.
#[derive(Debug)]
pub struct Postgres(BufReader<TcpStream>);

impl Postgres {
    /// Starts a client inside a namespace that commits a row at this interval.
    pub fn start(from: &Namespace, server: SocketAddr, every: Duration) -> Records {
        Records::start::<Self>(from, server, every)
    }

    fn query(&mut self, query: &str) -> io::Result<Vec<Row>> {
        let length = (query.len() + 5) as u32;
        let message = [b"Q", &length.to_be_bytes()[..], query.as_bytes(), b"\0"].concat();
        self.0.get_mut().write_all(&message)?;
        answer(&mut self.0)
    }
}

impl Store for Postgres {
    fn open(server: SocketAddr) -> io::Result<Self> {
        let mut opened = Self(connect(server)?);
        let length = (PARAMETERS.len() + 8) as u32;
        let head = [length, VERSION].map(u32::to_be_bytes).concat();
        opened
            .0
            .get_mut()
            .write_all(&[&head, PARAMETERS].concat())?;
        answer(&mut opened.0)?;
        opened
            .query("CREATE TABLE IF NOT EXISTS records (number bigint PRIMARY KEY, value text)")?;
        Ok(opened)
    }

    fn put(&mut self, number: u64, value: &str) -> io::Result<()> {
        let row = format!("INSERT INTO records VALUES ({number}, '{value}')");
        let again = "ON CONFLICT (number) DO UPDATE SET value = excluded.value";
        self.query(&format!("{row} {again}")).map(drop)
    }

    fn read(&mut self, _last: u64) -> io::Result<Vec<(u64, String)>> {
        let rows = self.query("SELECT number, value FROM records")?;
        let records = rows.into_iter().map(|row| {
            let [number, value] = <[String; 2]>::try_from(row).ok()?;
            Some((number.parse().ok()?, value))
        });
        let records: Option<Vec<_>> = records.collect();
        records.ok_or_else(|| io::Error::other("PostgreSQL answers with other columns"))
    }
}

/// Reads messages until the server is ready for a query. Returns the rows; an error of the server is an error.
fn answer(from: &mut impl Read) -> io::Result<Vec<Row>> {
    let mut rows = Vec::new();
    loop {
        let mut head = [0; 5];
        from.read_exact(&mut head)?;
        let [kind, length @ ..] = head;
        let length = (u32::from_be_bytes(length) as usize).checked_sub(4);
        let length = length.filter(|length| *length <= LONGEST);
        let mut body = vec![
            0;
            length.ok_or_else(|| io::Error::other(
                "a message of PostgreSQL without a length"
            ))?
        ];
        from.read_exact(&mut body)?;
        match kind {
            b'Z' => return Ok(rows),
            b'D' => {
                rows.push(row(&body).ok_or_else(|| io::Error::other("half a row of PostgreSQL"))?)
            }
            b'E' => {
                let text = String::from_utf8_lossy(&body).replace('\0', " ");
                return Err(io::Error::other(format!("PostgreSQL answers {text}")));
            }
            b'R' if body != [0; 4] => {
                return Err(io::Error::other("PostgreSQL asks for a password"));
            }
            _ => {}
        }
    }
}

/// Returns the columns of a row; `None` for half a row, or one with a null.
fn row(body: &[u8]) -> Option<Row> {
    let (count, mut rest) = body.split_first_chunk()?;
    let columns = (0..u16::from_be_bytes(*count)).map(|_| {
        let (length, after) = rest.split_first_chunk()?;
        let length = usize::try_from(i32::from_be_bytes(*length)).ok()?;
        let (column, after) = after.split_at_checked(length)?;
        rest = after;
        String::from_utf8(column.to_vec()).ok()
    });
    columns.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &[u8] = b"D\0\0\0\x10\0\x02\0\0\0\x011\0\0\0\x01x";
    const READY: &[u8] = b"Z\0\0\0\x05I";

    #[test]
    fn rows_end_with_ready() {
        let done = b"C\0\0\0\x0dSELECT 1\0";
        let rows = answer(&mut &[ROW, done, READY].concat()[..]).unwrap();
        assert_eq!(rows, [["1", "x"]]);
        assert!(answer(&mut &ROW[..]).is_err(), "no end");
        assert_eq!(row(&ROW[5..ROW.len() - 1]), None);
    }

    #[test]
    fn an_error_of_the_server_is_an_error() {
        let refused = [&b"E\0\0\0\x09SFATA"[..], READY].concat();
        let error = answer(&mut &refused[..]).unwrap_err().to_string();
        assert!(error.contains("FATA"), "{error}");
        assert!(answer(&mut &b"R\0\0\0\x08\0\0\0\x05"[..]).is_err());
        assert!(
            answer(&mut &b"Z\0\0\0\x01"[..]).is_err(),
            "shorter than its length"
        );
    }
}
