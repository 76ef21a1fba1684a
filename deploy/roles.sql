-- The database and its two users, for psql, as superuser of an empty cluster: docker-compose.yml runs it when its volume is made.
--
-- countermand_owner migrates: it owns the database and every table. countermand_service serves: it owns nothing, inherits nothing, and
-- may only become one of the two roles that the service's statements run as. The third, countermand_pruner, deletes what is past its
-- retention: `prune` runs as the owner, so that whoever takes over the service cannot delete what happened.
-- They stand in no other place but here and in the migrations, which find them made. Each password is taken from its database URL, so
-- that it is written down once.
\set ON_ERROR_STOP on
\set owner_password `sed -nE 's|^postgresql://[^:]+:([^@]+)@.*|\1|p' "$OWNER_DATABASE_URL_FILE"`
\set service_password `sed -nE 's|^postgresql://[^:]+:([^@]+)@.*|\1|p' "$SERVICE_DATABASE_URL_FILE"`

-- CREATEROLE: the migrations ask for the roles, and Postgres looks at the right to before it sees that they are there.
CREATE ROLE countermand_owner LOGIN CREATEROLE PASSWORD :'owner_password';
CREATE ROLE countermand_service LOGIN NOINHERIT PASSWORD :'service_password';

CREATE ROLE countermand_runtime NOLOGIN;
CREATE ROLE countermand_dispatcher NOLOGIN;
CREATE ROLE countermand_pruner NOLOGIN;
GRANT countermand_runtime, countermand_dispatcher, countermand_pruner TO countermand_owner WITH ADMIN OPTION;
GRANT countermand_runtime, countermand_dispatcher TO countermand_service;

CREATE DATABASE countermand OWNER countermand_owner;
REVOKE ALL ON DATABASE countermand FROM PUBLIC;
GRANT CONNECT ON DATABASE countermand TO countermand_service;
