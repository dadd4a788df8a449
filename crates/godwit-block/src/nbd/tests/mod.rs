mod handshake;
mod transmission;
